"""`CheckpointedAdjoint` beside Diffrax's own adjoints, which differentiate it too."""

import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow

diffrax = pytest.importorskip("diffrax")
import eqloop.diffrax  # noqa: E402
from eqloop.diffrax import CheckpointedAdjoint  # noqa: E402

pytestmark = pytest.mark.sampled

ADJOINTS = {
    "default": CheckpointedAdjoint(),
    "checkpoints": CheckpointedAdjoint(checkpoints=3),
    "schedule": CheckpointedAdjoint(schedule=el.Binomial(4)),
}
# Made into a `SaveAt` inside of the tests, where x64 is on: Diffrax's times take the
# type of `ts`, and what is interpolated at rounded times depends on how XLA fuses it.
SAVED = {
    "last": dict(t1=True),
    "times": dict(ts=np.linspace(0.05, 0.3, 6)),
    "steps": dict(steps=True),
}
CONTROLLERS = {
    "constant": diffrax.ConstantStepSize(),
    "adaptive": diffrax.PIDController(rtol=1e-3, atol=1e-4),
}
ARGS, Y0 = (10.0, 28.0, 8 / 3), (1.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def x64():
    # A step size that adapts magnifies rounding.
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def lorenz(t, y, args):
    s, r, b = args
    return jnp.stack(
        [s * (y[1] - y[0]), y[0] * (r - y[2]) - y[1], y[0] * y[1] - b * y[2]]
    )


def solution(adjoint, saved="last", controller="adaptive", solver=None, **settings):
    """From parameters and the initial value to what is saved."""

    def solve(args, y0):
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(lorenz),
            solver or diffrax.Tsit5(),
            0.0,
            0.3,
            0.03,
            y0,
            args,
            saveat=diffrax.SaveAt(**SAVED[saved]),
            stepsize_controller=CONTROLLERS[controller],
            adjoint=adjoint,
            max_steps=32,
            **settings,
        )
        return jnp.where(jnp.isfinite(found.ys), found.ys, 0)

    return solve


def inputs():
    return jnp.array(ARGS), jnp.array(Y0)


def weighed(solve):
    def loss(*args):
        ys = solve(*args)
        return jnp.sum(ys * jnp.cos(jnp.arange(ys.size * 1.0)).reshape(ys.shape))

    return loss


near = functools.partial(assert_close, rtol=1e-7, atol=1e-9)


def gradients(solve):
    return jax.jit(jax.value_and_grad(weighed(solve), (0, 1)))(*inputs())


CASES = [
    ("default", "last", "adaptive"),
    slow("checkpoints", "times", "adaptive"),
    slow("schedule", "times", "constant"),
    slow("schedule", "steps", "adaptive"),
    slow("default", "steps", "constant"),
]


@pytest.mark.parametrize(("name", "saved", "controller"), CASES)
def test_gradients(name, saved, controller):
    ours, theirs = ADJOINTS[name], diffrax.RecursiveCheckpointAdjoint()
    near(*(gradients(solution(a, saved, controller)) for a in (ours, theirs)))


def jvp(solve):
    return jax.jvp(solve, inputs(), inputs())


def linearize(solve):
    out, push = jax.linearize(solve, *inputs())
    return out, push(*inputs())


def jacfwd(solve):
    return jax.jacfwd(solve, (0, 1))(*inputs())


def jacrev(solve):
    return jax.jacrev(solve, (0, 1))(*inputs())


def hessian(solve):
    return jax.hessian(weighed(solve), (0, 1))(*inputs())


def reverse_over_reverse(solve):
    total = lambda *args: sum(map(jnp.sum, jax.grad(weighed(solve), (0, 1))(*args)))
    return jax.grad(total, (0, 1))(*inputs())


@pytest.mark.parametrize(
    "mode",
    [jvp, slow(linearize), slow(jacfwd), slow(jacrev), slow(hessian)],
    ids=lambda mode: mode.__name__,
)
@pytest.mark.parametrize("name", ["schedule", slow("checkpoints")])
def test_modes_are_those_of_the_direct_adjoint(mode, name):
    solves = (solution(a) for a in (ADJOINTS[name], diffrax.DirectAdjoint()))
    near(*(jax.jit(mode, static_argnums=0)(solve) for solve in solves))


@pytest.mark.parametrize("mode", [jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f))])
def test_what_forward_mode_does_not_move_is_not_batched(mode):
    """Where a `vmap` is within the loop, as in the step of an adaptive solver."""
    solve = solution(ADJOINTS["default"])
    loss = lambda batch: jnp.sum(jax.vmap(lambda y: solve(inputs()[0], y))(batch))
    batch = jnp.ones((2, *inputs()[1].shape))
    assert jax.eval_shape(mode(loss), batch).shape == batch.shape * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule", "checkpoints"])
def test_reverse_over_reverse(name):
    """Beside forward over reverse: that of `DirectAdjoint` takes minutes to compile."""
    solve = solution(ADJOINTS[name], controller="constant")
    both = jax.hessian(weighed(solve), (0, 1))(*inputs())
    rows = tuple(sum(block.sum(1) for block in row) for row in both)
    near(jax.jit(reverse_over_reverse, static_argnums=0)(solve), rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule", "checkpoints"])
@pytest.mark.parametrize("saved", SAVED)
def test_batches(name, saved):
    """Each example with its own number of steps, in a gradient and of gradients."""
    y0 = jnp.array([[1.0, 1.0, 1.0], [9.0, -3.0, 20.0], [0.1, 0.0, 0.0]])
    args, _ = inputs()

    def both(adjoint):
        loss = weighed(solution(adjoint, saved))
        batch = lambda args, y0: jax.vmap(loss, (None, 0))(args, y0).sum()
        each = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))
        return jax.jit(jax.grad(batch, (0, 1)))(args, y0), jax.jit(each)(args, y0)

    near(both(ADJOINTS[name]), both(diffrax.RecursiveCheckpointAdjoint()))


def sum_of_squares(adjoint, saves, until, dt0, max_steps):
    """A loss of what is saved of a solution; steps that were not run do not count."""

    def loss(args, y0):
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(lorenz),
            diffrax.Tsit5(),
            0.0,
            until,
            dt0,
            y0,
            args,
            saveat=diffrax.SaveAt(**saves),
            adjoint=adjoint,
            max_steps=max_steps,
        )
        return jnp.sum(jnp.where(jnp.isfinite(found.ys), found.ys, 0) ** 2)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("count", [1, 32])
def test_no_more_memory_than_diffrax(saved, count):
    saves = {**SAVED, "times": dict(ts=np.linspace(0.0, 20.0, 1000))}

    def taken(adjoint):
        end = sum_of_squares(adjoint, saves[saved], 20.0, 0.01, max_steps=2048)
        batch = lambda args, y0: jnp.sum(jax.vmap(end, (None, 0))(args, y0))
        loss, args = (end if count == 1 else batch), jnp.array(ARGS)
        y0 = jnp.ones(3) if count == 1 else jnp.ones((count, 3))
        return temp_bytes(jax.grad(loss, (0, 1)), args, y0)

    with jax.enable_x64(False):
        assert taken(CheckpointedAdjoint()) <= taken(
            diffrax.RecursiveCheckpointAdjoint()
        )


@pytest.mark.slow
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("each", [True, False], ids=["of gradients", "in a gradient"])
def test_batches_take_no_more_memory(saved, each):
    """The solutions of 32 equations and their cotangents, and little else."""

    def taken(adjoint):
        end = sum_of_squares(adjoint, saves[saved], 1.0, 1e-3, max_steps=1024)
        loss = lambda args, y0: jax.vmap(end, (None, 0))(args, y0).sum()
        f = jax.vmap(jax.grad(end), (None, 0)) if each else jax.grad(loss)
        args, y0 = inputs()
        batch = y0 * jnp.linspace(0.5, 1.5, 32)[:, None]
        return temp_bytes(f, args, batch)

    saves = {**SAVED, "times": dict(ts=np.linspace(0.0, 1.0, 600))}
    theirs = taken(diffrax.RecursiveCheckpointAdjoint())
    assert taken(CheckpointedAdjoint()) <= 1.05 * theirs + 64 * 1024


SOLVERS = {
    "implicit": diffrax.Kvaerno3(),
    "fixed": diffrax.Euler(),
    "long": diffrax.Dopri8(),
    "wrapped": diffrax.HalfSolver(diffrax.Bosh3()),
}


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_solvers(solver):
    controller = "constant" if solver is SOLVERS["fixed"] else "adaptive"
    settings = dict(controller=controller, solver=solver)
    ours = solution(ADJOINTS["checkpoints"], **settings)
    theirs = solution(diffrax.RecursiveCheckpointAdjoint(), **settings)
    near(gradients(ours), gradients(theirs))
    push = lambda solve: jax.jvp(weighed(solve), inputs(), inputs())[1]
    pull = jax.jvp(lambda *a: weighed(ours)(*a), inputs(), inputs())[1]
    near(push(ours), pull)
    grads = gradients(ours)[1]
    along = sum(jnp.vdot(g, x) for g, x in zip(grads, inputs(), strict=True))
    near(push(ours), along)


class WrapsByProperty(diffrax.AbstractWrappedSolver):
    """It passes for the solver that it wraps, which is no field of it."""

    term_structure = diffrax.AbstractTerm
    interpolation_cls = diffrax.LocalLinearInterpolation
    term_compatible_contr_kwargs = property(lambda self: {})

    @property
    def solver(self):
        return diffrax.Heun()

    def order(self, terms):
        return self.solver.order(terms)

    def init(self, *inputs):
        return self.solver.init(*inputs)

    def step(self, *inputs):
        *_, state, result = outs = self.solver.step(*inputs)
        dense = dict(y0=inputs[3], y1=outs[0])
        return outs[0], outs[1], dense, state, result

    def func(self, *inputs):
        return self.solver.func(*inputs)


@pytest.mark.slow
def test_solvers_that_wrap_others():
    """They have not the settings of a Runge-Kutta method, which they pass for."""
    ours, theirs = (
        solution(adjoint, controller="constant", solver=WrapsByProperty())
        for adjoint in (CheckpointedAdjoint(), diffrax.RecursiveCheckpointAdjoint())
    )
    near(gradients(ours), gradients(theirs))
    # What it makes of the gradient is looked at above, slowly.
    half = solution(
        CheckpointedAdjoint(),
        controller="constant",
        solver=diffrax.HalfSolver(diffrax.Heun()),
    )
    by_args, by_y0 = jax.eval_shape(jax.grad(weighed(half), (0, 1)), *inputs())
    assert (by_args.shape, by_y0.shape) == ((3,), (3,))


class Named(diffrax.Heun):
    """A Runge-Kutta method whose `__init__` does not take its fields."""

    def __init__(self, name):
        assert name == "heun"


class Chosen(diffrax.HalfSolver):
    """A solver that makes the one that it wraps."""

    def __init__(self, name):
        self.solver = Named(name)


def test_solvers_with_an_init_of_their_own():
    """They are not made anew from their fields, which would be an error."""
    settings = dict(controller="constant", solver=Chosen("heun"))
    loss = weighed(solution(CheckpointedAdjoint(), **settings))
    by_args, by_y0 = jax.eval_shape(jax.grad(loss, (0, 1)), *inputs())
    assert (by_args.shape, by_y0.shape) == ((3,), (3,))


# Brownian paths refuse to be differentiated by time, and such a step size makes times.
LOOSE = diffrax.PIDController(rtol=0.1, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("controller", [CONTROLLERS["constant"], LOOSE])
def test_stochastic_equations(controller):
    def solve(adjoint):
        def run(scale, y0):
            path = diffrax.VirtualBrownianTree(
                0.0, 0.3, 1e-3, (2,), jax.random.key(0), diffrax.SpaceTimeLevyArea
            )
            noise = lambda t, y, args: jnp.diag(scale[:2])
            drift = diffrax.ODETerm(lambda t, y, args: -y)
            terms = diffrax.MultiTerm(drift, diffrax.ControlTerm(noise, path))
            found = diffrax.diffeqsolve(
                terms,
                diffrax.SRA1(),
                0.0,
                0.3,
                0.05,
                y0[:2],
                stepsize_controller=controller,
                adjoint=adjoint,
                max_steps=16,
            )
            return found.ys

        return run

    ours, theirs = (
        solve(a) for a in (ADJOINTS["schedule"], diffrax.RecursiveCheckpointAdjoint())
    )
    near(gradients(ours), gradients(theirs))
    near(jax.jacfwd(ours)(*inputs()), jax.jacrev(ours)(*inputs()))


@pytest.mark.slow
def test_events_and_bars_and_dense_output(capsys):
    def solve(adjoint):
        def run(args, y0):
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: -args * y),
                diffrax.Tsit5(),
                0.0,
                3.0,
                0.1,
                y0,
                args[0] / 10,
                event=diffrax.Event(lambda t, y, args, **kw: y[0] - 0.5),
                saveat=diffrax.SaveAt(t1=True, dense=True),
                adjoint=adjoint,
                progress_meter=diffrax.TextProgressMeter(minimum_increase=0.4),
                max_steps=64,
            )
            return jnp.concatenate([found.ys[0], found.evaluate(0.25)])

        return run

    ours, theirs = (
        solve(a)
        for a in (ADJOINTS["checkpoints"], diffrax.RecursiveCheckpointAdjoint())
    )
    near(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("name", ADJOINTS)
def test_arguments_in_bfloat16(name):
    """Each of 600 steps adds one to their cotangents."""
    term = diffrax.ODETerm(lambda t, y, args: args.astype(y.dtype))
    settings = dict(dt0=1.0, y0=jnp.zeros(2), adjoint=ADJOINTS[name], max_steps=700)

    def end(args):
        solution = diffrax.diffeqsolve(
            term, diffrax.Euler(), 0.0, 600.0, args=args, **settings
        )
        return jnp.sum(solution.ys)

    found = jax.jit(jax.grad(end))(jnp.ones(2, "bfloat16"))
    assert found.tolist() == [600, 600]


def test_memory_does_not_grow_with_the_number_of_steps():
    """It is that of the carries, however many steps the solver may take."""

    def stored(max_steps):
        def end(args, y0):
            found = diffrax.diffeqsolve(
                diffrax.ODETerm(lorenz),
                diffrax.Euler(),
                0.0,
                1.0,
                1e-3,
                y0,
                args,
                adjoint=CheckpointedAdjoint(checkpoints=8),
                max_steps=max_steps,
            )
            return found.ys.sum()

        return temp_bytes(jax.grad(end), *inputs())

    assert stored(4096) == stored(1024)


def test_without_a_bound_on_the_number_of_steps():
    """Diffrax's own has no gradient there by default."""

    def end(rate):
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: -args * y),
            diffrax.Euler(),
            0.0,
            1.0,
            1e-2,
            jnp.array(1.0),
            rate,
            adjoint=CheckpointedAdjoint(),
            max_steps=None,
        )
        return found.ys[0]

    near(jax.grad(end)(1.0), -((1 - 1e-2) ** 99))


@pytest.mark.parametrize(
    ("name", "saved", "loops"),
    [
        slow("checkpoints", "last", [("CheckpointedWhileLoop", 32, 0)]),
        slow("checkpoints", "times", [("CheckpointedWhileLoop", 32, 0)]),
        slow("schedule", "last", [("ScanWhile", 32, 0)]),
    ],
)
def test_its_loops_are_listed(name, saved, loops):
    """By the user's line, although Diffrax is between."""
    gradient = jax.grad(weighed(solution(ADJOINTS[name], saved)))
    if saved == "times":
        loops = [*loops, ("CheckpointedWhileLoop", len(SAVED["times"]["ts"]), 1)]
    batch = [jnp.stack([x] * 3) for x in inputs()]
    found = el.plans(jax.vmap(gradient))(*batch)
    assert [(one.name, one.plan.length, one.depth) for one in found] == loops
    assert {one.batch for one in found} == {3}
    assert {one.place.function for one in found} == {"solve"}
    assert {one.place.file for one in found} == {__file__}
    assert found[0].plan.slots == {"checkpoints": 3, "schedule": 4}[name]


def test_what_diffrax_stores_by_itself_is_listed():
    """So many states, of an equation that needs little more."""
    checkpoints, size = 50, 1000
    adjoint = diffrax.RecursiveCheckpointAdjoint(checkpoints=checkpoints)

    def last(y):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jnp.sin(y)),
            diffrax.Euler(),
            0.0,
            1.0,
            0.01,
            y,
            adjoint=adjoint,
            max_steps=100,
        ).ys.sum()

    y = jnp.ones(size)
    found = el.plans(jax.grad(last))(y)
    assert {x.name for x in found} == {"lax.while_loop"}
    assert {x.place.file for x in found} == {__file__}
    assert max(x.plan.peak_bytes for x in found) == pytest.approx(
        checkpoints * y.nbytes, rel=0.1
    )
    assert found.peak_bytes <= temp_bytes(jax.grad(last), y)
    frugal = el.Reschedule(last, el.Recursive())
    assert any("its rule stores" in why for _, why in frugal.plans(y).left)


def test_what_is_used_of_diffrax_is_there():
    """Its parts that no page of its documentation names."""
    expected = {"inner_while_loop", "outer_while_loop", "max_steps", "solver", "terms"}
    loop = CheckpointedAdjoint()._loop
    assert expected <= inspect.signature(loop).parameters.keys()
    theirs = inspect.signature(diffrax.AbstractAdjoint.loop).parameters
    named = inspect.signature(CheckpointedAdjoint.loop).parameters.keys() - {"settings"}
    assert named <= theirs.keys()
    assert diffrax.Tsit5().scan_kind is None
    assert diffrax.SRA1().scan_kind is None


def solved(adjoint, **settings):
    path = settings.pop("path", None)
    terms = diffrax.ODETerm(lambda t, y, args: -y)
    if path is not None:
        terms = diffrax.MultiTerm(
            terms, diffrax.ControlTerm(lambda t, y, args: jnp.ones(()), path)
        )
    return diffrax.diffeqsolve(
        terms, diffrax.Euler(), 0.0, 1.0, 0.1, 1.0, adjoint=adjoint, **settings
    )


WRONG = {
    "checkpoints": (
        lambda: CheckpointedAdjoint(checkpoints=2.5),
        TypeError,
        "CheckpointedAdjoint: `checkpoints` must be an int, the number of carries",
    ),
    "no checkpoints": (
        lambda: CheckpointedAdjoint(checkpoints=0),
        ValueError,
        "CheckpointedAdjoint: `checkpoints` must be at least 1, but it is 0.",
    ),
    "schedule": (
        lambda: CheckpointedAdjoint(schedule="64MiB"),
        TypeError,
        "CheckpointedAdjoint: `schedule` must be a schedule, such as "
        "`el.Binomial(30)`, not '64MiB'.",
    ),
    "both": (
        lambda: CheckpointedAdjoint(checkpoints=3, schedule=el.Recursive(2)),
        ValueError,
        "CheckpointedAdjoint: give either `checkpoints` or a `schedule`",
    ),
    "schedule in place of checkpoints": (
        lambda: CheckpointedAdjoint(el.Chunked(3)),
        TypeError,
        "CheckpointedAdjoint: `checkpoints` must be an int, the number of carries",
    ),
    "truth": (
        lambda: CheckpointedAdjoint(checkpoints=True),
        TypeError,
        "but it is True, of type bool.",
    ),
    "traced": (
        lambda: jax.jit(lambda n: solved(CheckpointedAdjoint(checkpoints=n)).ys)(4),
        TypeError,
        "CheckpointedAdjoint: `checkpoints` must be an int, the number of carries",
    ),
    "class of schedules": (
        lambda: CheckpointedAdjoint(schedule=el.Chunked),
        TypeError,
        "`el.Binomial(30)`, not <class 'eqloop.checkpointing._schedules.Chunked'>.",
    ),
    "class": (
        lambda: solved(CheckpointedAdjoint),
        TypeError,
        "CheckpointedAdjoint: `adjoint` must be made from this class, by `adjoint=Che",
    ),
    "class of the other": (
        lambda: solved(eqloop.diffrax.ReversibleAdjoint),
        TypeError,
        "ReversibleAdjoint: `adjoint` must be made from this class",
    ),
    "a budget for a number": (
        lambda: CheckpointedAdjoint(el.Budget("1KiB")),
        TypeError,
        "given by name: `CheckpointedAdjoint(schedule=Budget(nbytes='1KiB'))`",
    ),
    "truncation": (
        lambda: CheckpointedAdjoint(schedule=el.Truncate(3)),
        TypeError,
        "`el.Binomial(30)`, not Truncate(every=3).",
    ),
    "no bound": (
        lambda: solved(ADJOINTS["schedule"], max_steps=None),
        ValueError,
        "CheckpointedAdjoint: a `schedule` is planned for a number of steps. Give",
    ),
    "unsafe path": (
        lambda: solved(
            ADJOINTS["default"],
            path=diffrax.UnsafeBrownianPath((), jax.random.key(0)),
        ),
        ValueError,
        "CheckpointedAdjoint: `UnsafeBrownianPath` gives other numbers when a step",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_everything_public_is_in_the_reference():
    page = pathlib.Path(__file__).parents[2] / "docs" / "api" / "diffrax.md"
    names = re.findall(r"^::: eqloop\.diffrax\.(\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(names) == sorted(eqloop.diffrax.__all__)


@pytest.mark.parametrize(
    ("name", "saved", "controller"),
    [
        ("checkpoints", "last", "adaptive"),
        slow("default", "last", "adaptive"),
        slow("schedule", "last", "constant"),
        slow("default", "times", "adaptive"),
        slow("default", "steps", "constant"),
    ],
)
def test_on_devices_that_stop_at_their_own_times(name, saved, controller):
    """In a checked `shard_map`, with parameters that are the same on all devices."""
    settings = dict(saved=saved, controller=controller, throw=False)
    args, y0 = jnp.array(ARGS), jnp.array([Y0, (9.0, -3.0, 20.0)])

    def gradient(adjoint, spread):
        loss = weighed(solution(adjoint, **settings))
        run = spread(lambda args, y0: loss(args, y0[0])[None])
        return jax.jit(jax.grad(lambda *args: jnp.sum(run(*args)), (0, 1)))(args, y0)

    def on_devices(run):
        mesh = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,))
        each = PartitionSpec("device")
        return jax.shard_map(
            run, mesh=mesh, in_specs=(PartitionSpec(), each), out_specs=each
        )

    def in_turn(run):
        return lambda args, y0: jax.lax.map(lambda y: run(args, y[None]), y0)

    theirs = diffrax.RecursiveCheckpointAdjoint()
    near(gradient(ADJOINTS[name], on_devices), gradient(theirs, in_turn))
