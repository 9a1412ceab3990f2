"""`ReversibleAdjoint` beside the adjoints of Diffrax, of the same solves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow

diffrax = pytest.importorskip("diffrax")
from eqloop.diffrax import Coupled, ReversibleAdjoint  # noqa: E402

pytestmark = pytest.mark.sampled

WIDTH = 4
# By a solver: it, and the same as it is solved under another adjoint. Loops over the
# stages of these are differentiable in every mode.
SOLVERS = {
    "heun": (diffrax.ReversibleHeun(), diffrax.ReversibleHeun()),
    "tsit5": (diffrax.Tsit5(), Coupled(diffrax.Tsit5(scan_kind="bounded"))),
    "midpoint": (diffrax.Midpoint(), Coupled(diffrax.Midpoint(scan_kind="bounded"))),
    "halved": (
        diffrax.HalfSolver(diffrax.Euler()),
        Coupled(diffrax.HalfSolver(diffrax.Euler())),
    ),
}
SAVED = {
    "end": lambda: diffrax.SaveAt(t1=True),
    "times": lambda: diffrax.SaveAt(ts=jnp.array([0.0, 0.0, 0.31, 0.32, 1.4, 2.0])),
    "steps": lambda: diffrax.SaveAt(steps=True),
    "all": lambda: diffrax.SaveAt(
        t0=True, t1=True, steps=3, ts=jnp.linspace(0, 1, 5), fn=lambda t, y, _: t * y
    ),
    "two": lambda: diffrax.SaveAt(
        subs=[
            diffrax.SubSaveAt(ts=jnp.linspace(0.1, 2, 3)),
            diffrax.SubSaveAt(steps=True, fn=lambda t, y, _: y[:2]),
        ]
    ),
}
CONTROLLERS = {
    "constant": lambda: (diffrax.ConstantStepSize(), 0.07),
    "adaptive": lambda: (diffrax.PIDController(1e-3, 1e-5, dtmax=0.2), None),
    "clipped": lambda: (
        diffrax.ClipStepSizeController(
            diffrax.PIDController(1e-3, 1e-5), step_ts=[0.5], store_rejected_steps=2
        ),
        1.5,
    ),
    "given": lambda: (diffrax.StepTo(jnp.linspace(0, 2, 20) ** 1.5 / 2**0.5), None),
}


@pytest.fixture(autouse=True)
def x64():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def field(t, y, w):
    return jnp.tanh(w @ y) + 0.1 * jnp.sin(5 * t)


def inputs():
    w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH))
    return jnp.asarray(w - w.T), jnp.cos(jnp.arange(1.0 * WIDTH))


def loss_of(adjoint, solver, controller="constant", saved="end", **settings):
    def loss(w, y0):
        steps, dt0 = CONTROLLERS[controller]()
        how = dict(
            terms=diffrax.ODETerm(field),
            t0=0.0,
            t1=2.0,
            dt0=dt0,
            max_steps=256,
            stepsize_controller=steps,
        )
        found = diffrax.diffeqsolve(
            solver=solver,
            y0=y0,
            args=w,
            saveat=SAVED[saved](),
            adjoint=adjoint,
            **how | settings,
        )
        ys = jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), found.ys)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(ys))

    return loss


def both(name, *args, **settings):
    """The loss with our adjoint, and with Diffrax's direct one."""
    ours, theirs = SOLVERS[name]
    return (
        loss_of(ReversibleAdjoint(), ours, *args, **settings),
        loss_of(diffrax.DirectAdjoint(), theirs, *args, **settings),
    )


near = functools.partial(assert_close, rtol=1e-7, atol=1e-9)
CASES = [
    ("tsit5", "adaptive", "times"),
    slow("heun", "constant", "all"),
    slow("heun", "adaptive", "two"),
    slow("tsit5", "constant", "two"),
    slow("tsit5", "given", "steps"),
    slow("tsit5", "clipped", "all"),
    slow("midpoint", "constant", "times"),
    slow("heun", "given", "end"),
    slow("halved", "adaptive", "end"),
    slow("tsit5", "constant", "end"),
]


@pytest.mark.parametrize(("name", "controller", "saved"), CASES)
def test_gradients(name, controller, saved):
    pair = both(name, controller, saved)
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in pair)
    near(found(*inputs()), expected(*inputs()))


def batch():
    """Four examples, each with its own steps."""
    w, y0 = inputs()
    sizes = jnp.array([0.1, 1.0, 3.0, 0.5])[:, None]
    return w, sizes * y0


def grad_of_batch(f, w, ys):
    total = lambda w, ys: jnp.sum(jax.vmap(f, (None, 0))(w, ys))
    return jax.grad(total, (0, 1))(w, ys)


def batch_of_grads(f, w, ys):
    return jax.vmap(jax.grad(f, (0, 1)), (None, 0))(w, ys)


def hessian(f, w, ys):
    return jax.jacfwd(jax.grad(f, 1), 1)(w, ys[0])


def reverse_twice(f, w, ys):
    return jax.grad(lambda y: jnp.sum(jax.grad(f, 1)(w, y) ** 2))(ys[0])


def tangents(f, w, ys):
    return jax.jvp(f, (w, ys[0]), (w, ys[0]))


MODES = [
    ("heun", "adaptive", batch_of_grads),
    slow("tsit5", "adaptive", grad_of_batch),
    slow("tsit5", "adaptive", batch_of_grads),
    slow("tsit5", "constant", grad_of_batch),
    slow("heun", "constant", batch_of_grads),
    slow("tsit5", "adaptive", hessian),
    slow("heun", "constant", hessian),
    slow("heun", "constant", reverse_twice),
    slow("heun", "adaptive", tangents),
]


@pytest.mark.parametrize(("name", "controller", "mode"), MODES)
def test_modes(name, controller, mode):
    """As different examples stop at different times, and as derivatives need them."""
    found, expected = (
        jax.jit(functools.partial(mode, f)) for f in both(name, controller, "times")
    )
    near(found(*batch()), expected(*batch()))


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["constant", "adaptive"])
def test_in_reversed_time(controller):
    steps = {"constant": -0.07, "adaptive": None}[controller]
    times = dict(t0=2.0, t1=0.0, dt0=steps, saveat=diffrax.SaveAt(t1=True))
    losses = []
    for adjoint, solver in zip(
        (ReversibleAdjoint(), diffrax.DirectAdjoint()), SOLVERS["tsit5"], strict=True
    ):

        def loss(w, y0, adjoint=adjoint, solver=solver):
            controls = CONTROLLERS[controller]()[0]
            how = dict(times, stepsize_controller=controls, adjoint=adjoint)
            term = diffrax.ODETerm(field)
            found = diffrax.diffeqsolve(
                term, solver, y0=y0, args=w, max_steps=64, **how
            )
            return jnp.sum(found.ys**2)

        losses.append(jax.jit(jax.grad(loss, (0, 1))))
    near(losses[0](*inputs()), losses[1](*inputs()))


@pytest.mark.parametrize("name", ["heun", slow("midpoint")])
def test_stochastic_equations(name):
    """Increments of a virtual Brownian tree are found again on the way back."""

    def loss(adjoint, solver, w, y0):
        tree = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (WIDTH,), jax.random.key(3))
        noise = diffrax.ControlTerm(
            lambda t, y, w: 0.3 * jnp.diag(jnp.cos(w @ y)), tree
        )
        terms = diffrax.MultiTerm(diffrax.ODETerm(field), noise)
        found = diffrax.diffeqsolve(
            terms, solver, 0.0, 1.0, 0.05, y0, w, adjoint=adjoint, max_steps=32
        )
        return jnp.sum(found.ys**2)

    ours, theirs = SOLVERS[name]
    found = jax.value_and_grad(functools.partial(loss, ReversibleAdjoint(), ours))
    expected = jax.value_and_grad(
        functools.partial(loss, diffrax.DirectAdjoint(), theirs)
    )
    near(jax.jit(found)(*inputs()), jax.jit(expected)(*inputs()))


@pytest.mark.slow
def test_trees_and_pairs_of_terms():
    """A symplectic solver, whose value is a pair and whose terms are."""

    def loss(adjoint, solver, k, q):
        terms = (
            diffrax.ODETerm(lambda t, p, k: p),
            diffrax.ODETerm(lambda t, q, k: {"a": -k * jnp.sin(q["a"])}),
        )
        y0 = {"a": q}, {"a": jnp.zeros_like(q)}
        found = diffrax.diffeqsolve(
            terms, solver, 0.0, 1.0, 0.1, y0, k, adjoint=adjoint, max_steps=16
        )
        return sum(jnp.sum(y["a"] ** 2) for y in found.ys)

    solver, args = diffrax.SemiImplicitEuler(), (jnp.array(2.0), jnp.arange(3.0))
    found = jax.grad(functools.partial(loss, ReversibleAdjoint(), solver), (0, 1))
    expected = functools.partial(loss, diffrax.DirectAdjoint(), Coupled(solver))
    near(found(*args), jax.grad(expected, (0, 1))(*args))


@pytest.mark.parametrize("name", ["heun", slow("tsit5")])
def test_memory(name):
    """With a constant step size it is the same for any number of steps.

    With an adaptive one, the times of the steps are saved, and nothing else.
    """
    sizes = {}
    for controller in ("constant", "adaptive"):
        for steps in (100, 10_000):
            settings = dict(max_steps=steps)
            if controller == "constant":
                settings["dt0"] = 2.0 / steps
            f = loss_of(ReversibleAdjoint(), SOLVERS[name][0], controller, **settings)
            sizes[controller, steps] = temp_bytes(jax.grad(f, (0, 1)), *inputs())
    assert sizes["constant", 10_000] == sizes["constant", 100]
    more = sizes["adaptive", 10_000] - sizes["adaptive", 100]
    assert abs(more - 9900 * 2 * 8) <= 256


@pytest.mark.slow
def test_steps_without_a_bound():
    unbounded = loss_of(ReversibleAdjoint(), diffrax.Tsit5(), max_steps=None)
    bounded = loss_of(ReversibleAdjoint(), diffrax.Tsit5())
    near(jax.grad(unbounded, (0, 1))(*inputs()), jax.grad(bounded, (0, 1))(*inputs()))
    assert temp_bytes(jax.grad(unbounded, (0, 1)), *inputs()) < 20_000


@pytest.mark.slow
def test_checkpoints_keep_what_contracts():
    """Run in reverse, an equation that contracts loses its digits."""

    def loss(adjoint, y0):
        term = diffrax.ODETerm(lambda t, y, args: -25 * y + jnp.sin(t))
        found = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 2.0, 0.01, y0, adjoint=adjoint, max_steps=200
        )
        return jnp.sum(jnp.sin(found.ys * 1e6))

    def gradient(adjoint):
        return float(
            jax.jit(jax.grad(functools.partial(loss, adjoint)))(jnp.array(1.0))
        )

    many = [gradient(ReversibleAdjoint(checkpoints=n)) for n in (20, 200)]
    assert many[0] == pytest.approx(many[1], rel=1e-5)


@pytest.mark.slow
def test_the_coupled_solver_has_the_order_of_its_own():
    """And so has what is interpolated, which passes through the values at the steps."""

    def errors(solver, dt):
        term = diffrax.ODETerm(lambda t, y, _: -y * jnp.cos(t))
        ts = jnp.linspace(0.01, 1.99, 23)
        found = diffrax.diffeqsolve(
            term, solver, 0.0, 2.0, dt, jnp.array(1.0), saveat=diffrax.SaveAt(ts=ts)
        )
        return float(jnp.max(jnp.abs(found.ys - jnp.exp(-jnp.sin(ts)))))

    coupled = Coupled(diffrax.Tsit5())
    coarse, fine = errors(coupled, 0.2), errors(coupled, 0.1)
    assert coarse / fine > 10
    assert coarse < 20 * errors(diffrax.Tsit5(), 0.2)
    term = diffrax.ODETerm(lambda t, y, _: -y)
    how = 0.0, 1.0, 0.25, jnp.array(1.0)
    steps = diffrax.SaveAt(steps=True)
    at = diffrax.diffeqsolve(term, coupled, *how, saveat=steps, max_steps=4)
    times = diffrax.SaveAt(ts=at.ts)
    again = diffrax.diffeqsolve(term, coupled, *how, saveat=times, max_steps=4)
    near(again.ys, at.ys)
    dense = diffrax.SaveAt(dense=True)
    whole = diffrax.diffeqsolve(term, coupled, *how, saveat=dense, max_steps=4)
    near(jax.vmap(whole.evaluate)(at.ts), at.ys)
    near(whole.evaluate(0.3, 0.6), whole.evaluate(0.6) - whole.evaluate(0.3))


@pytest.mark.slow
def test_a_solve_goes_on_from_the_state_of_another():
    def halves(adjoint):
        def loss(w, y0):
            term, solver = diffrax.ODETerm(field), Coupled(diffrax.Tsit5())
            solve = functools.partial(
                diffrax.diffeqsolve, term, solver, dt0=0.1, args=w, adjoint=adjoint
            )
            saveat = diffrax.SaveAt(t1=True, solver_state=True)
            first = solve(t0=0.0, t1=1.0, y0=y0, saveat=saveat)
            state = first.solver_state
            second = solve(t0=1.0, t1=2.0, y0=first.ys[-1], solver_state=state)
            return jnp.sum(second.ys**2)

        return jax.jit(jax.grad(loss, (0, 1)))(*inputs())

    others = diffrax.RecursiveCheckpointAdjoint()
    near(halves(ReversibleAdjoint()), halves(others))


def refused(match, solver=None, adjoint=None, error=ValueError, **settings):
    f = loss_of(adjoint or ReversibleAdjoint(), solver or diffrax.Tsit5(), **settings)
    with pytest.raises(error, match=match):
        f(*inputs())


def test_what_cannot_be_reversed():
    kvaerno = dict(solver=diffrax.Kvaerno3(), controller="adaptive")
    refused("Kvaerno3 solves an equation at each step", **kvaerno)
    refused("LeapfrogMidpoint computes a step from two", diffrax.LeapfrogMidpoint())
    event = diffrax.Event(lambda t, y, args, **_: y[0] > 2)
    refused("the time of an event", event=event)
    adaptive = diffrax.PIDController(1e-3, 1e-5)
    unbounded = dict(max_steps=None, stepsize_controller=adaptive)
    refused("without `max_steps`", **unbounded)
    refused(
        "without `max_steps`", None, ReversibleAdjoint(checkpoints=2), max_steps=None
    )
    jumps = diffrax.ClipStepSizeController(adaptive, jump_ts=[0.5])
    starts_anew = "`ReversibleHeun` starts anew at a jump"
    refused(starts_anew, diffrax.ReversibleHeun(), stepsize_controller=jumps)
    with pytest.raises(ValueError, match="`SaveAt\\(dense=True\\)` stores all steps"):
        diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            inputs()[1],
            inputs()[0],
            saveat=diffrax.SaveAt(dense=True),
            adjoint=ReversibleAdjoint(),
        )


def test_stochastic_equations_that_cannot_be_reversed():
    def solve(path, solver):
        noise = diffrax.ControlTerm(lambda t, y, args: 0.1, path)
        terms = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: -y), noise)
        how = 0.0, 1.0, 0.1, jnp.array(1.0)
        diffrax.diffeqsolve(terms, solver, *how, adjoint=ReversibleAdjoint())

    tree = diffrax.VirtualBrownianTree(0.0, 1.0, 0.01, (), jax.random.key(0))
    with pytest.raises(ValueError, match="Euler converges to the solution in Itô's"):
        solve(tree, diffrax.Euler())
    unsafe = diffrax.UnsafeBrownianPath((), jax.random.key(0))
    with pytest.raises(ValueError, match="`UnsafeBrownianPath` gives other numbers"):
        solve(unsafe, diffrax.Heun())
    area = diffrax.VirtualBrownianTree(
        0.0, 1.0, 0.01, (), jax.random.key(0), diffrax.SpaceTimeLevyArea
    )
    with pytest.raises(ValueError, match="ShARK needs more of a Brownian motion"):
        solve(area, diffrax.ShARK())


def test_what_the_classes_take():
    for cls in (ReversibleAdjoint, functools.partial(Coupled, diffrax.Tsit5())):
        for value in (0.0, 1.0, 2, "0.9", True):
            with pytest.raises(ValueError, match="`coupling`, the factor by which"):
                cls(coupling=value)
    with pytest.raises(ValueError, match="`checkpoints`"):
        ReversibleAdjoint(checkpoints=0)
    with pytest.raises(TypeError, match="`checkpoints`"):
        ReversibleAdjoint(checkpoints=1.5)
    with pytest.raises(TypeError, match="`solver` must be a solver of Diffrax"):
        Coupled(3)
    with pytest.raises(ValueError, match="Coupled: ImplicitEuler solves an equation"):
        Coupled(diffrax.ImplicitEuler())
    state = dict(solver_state=(jnp.array(True), jnp.zeros(WIDTH)))
    refused("the state of another solver was passed", **state)
