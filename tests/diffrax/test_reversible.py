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
from eqloop.diffrax import ReversibleAdjoint  # noqa: E402

pytestmark = pytest.mark.sampled

WIDTH = 4
SOLVERS = {
    "heun": diffrax.ReversibleHeun(),
    "tsit5": diffrax.Tsit5(),
    "midpoint": diffrax.Midpoint(),
    "bosh3": diffrax.Bosh3(),
    "dopri8": diffrax.Dopri8(),
    "halved": diffrax.HalfSolver(diffrax.Euler()),
    "halves": diffrax.HalfSolver(diffrax.Bosh3()),
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
    "jumping": lambda: (
        diffrax.ClipStepSizeController(
            diffrax.PIDController(1e-3, 1e-5), jump_ts=[0.5, 0.9, 1.3]
        ),
        None,
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
            saveat=SAVED[saved](),
        )
        found = diffrax.diffeqsolve(
            solver=solver,
            y0=y0,
            args=w,
            adjoint=adjoint,
            **how | settings,
        )
        ys = jax.tree.map(lambda y: jnp.where(jnp.isfinite(y), y, 0), found.ys)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(ys))

    return loss


def both(name, *args, forward=False, **settings):
    """The loss with our adjoint, and with that of Diffrax for the derivative."""
    direct, default = diffrax.DirectAdjoint(), diffrax.RecursiveCheckpointAdjoint()
    adjoints = ReversibleAdjoint(), direct if forward else default
    return [loss_of(adjoint, SOLVERS[name], *args, **settings) for adjoint in adjoints]


near = functools.partial(assert_close, rtol=1e-9, atol=1e-11)
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
    slow("halves", "adaptive", "steps"),
    slow("bosh3", "adaptive", "end"),
    slow("dopri8", "clipped", "end"),
    slow("tsit5", "constant", "end"),
    slow("tsit5", "jumping", "times"),
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
    forward = mode not in (batch_of_grads, grad_of_batch)
    pair = both(name, controller, "times", forward=forward)
    found, expected = (jax.jit(functools.partial(mode, f)) for f in pair)
    near(found(*batch()), expected(*batch()))


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["constant", "adaptive"])
def test_in_reversed_time(controller):
    steps = {"constant": -0.07, "adaptive": None}[controller]
    times = dict(t0=2.0, t1=0.0, dt0=steps, saveat=diffrax.SaveAt(t1=True))
    found, expected = (
        jax.jit(jax.grad(f, (0, 1))) for f in both("tsit5", controller, **times)
    )
    near(found(*inputs()), expected(*inputs()))


STOCHASTIC = {
    "heun": (diffrax.ReversibleHeun(), diffrax.BrownianIncrement),
    "midpoint": (diffrax.Midpoint(), diffrax.BrownianIncrement),
    "euler": (diffrax.Euler(), diffrax.BrownianIncrement),
    "milstein": (diffrax.ItoMilstein(), diffrax.BrownianIncrement),
    "shark": (diffrax.ShARK(), diffrax.SpaceTimeLevyArea),
    "spark": (diffrax.SPaRK(), diffrax.SpaceTimeLevyArea),
}


@pytest.mark.parametrize("name", ["euler", *map(slow, set(STOCHASTIC) - {"euler"})])
def test_stochastic_equations(name):
    """Increments of a virtual Brownian tree are found again on the way back."""
    solver, kind = STOCHASTIC[name]

    def loss(adjoint, w, y0):
        tree = diffrax.VirtualBrownianTree(
            0.0, 1.0, 1e-3, (WIDTH,), jax.random.key(3), kind
        )
        size = lambda y: 1.0 if name == "shark" else jnp.cos(w @ y)
        noise = diffrax.ControlTerm(
            lambda t, y, w: 0.3 * jnp.diag(size(y) * jnp.ones(WIDTH)), tree
        )
        terms = diffrax.MultiTerm(diffrax.ODETerm(field), noise)
        found = diffrax.diffeqsolve(
            terms, solver, 0.0, 1.0, 0.05, y0, w, adjoint=adjoint, max_steps=32
        )
        return jnp.sum(found.ys**2)

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, adjoint), (0, 1)))
        for adjoint in (ReversibleAdjoint(), diffrax.RecursiveCheckpointAdjoint())
    )
    near(found(*inputs()), expected(*inputs()))


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
    found, expected = (
        jax.grad(functools.partial(loss, adjoint, solver), (0, 1))(*args)
        for adjoint in (ReversibleAdjoint(), diffrax.DirectAdjoint())
    )
    near(found, expected)


@pytest.mark.parametrize("name", ["heun", slow("tsit5")])
def test_memory(name):
    """With a constant step size it is the same for any number of steps.

    With an adaptive one, the times of the steps are saved, and of a solver that keeps
    rates of change whether they jumped.
    """
    sizes = {}
    for controller in ("constant", "adaptive"):
        for steps in (100, 10_000):
            settings = dict(max_steps=steps)
            if controller == "constant":
                settings["dt0"] = 2.0 / steps
            f = loss_of(ReversibleAdjoint(), SOLVERS[name], controller, **settings)
            sizes[controller, steps] = temp_bytes(jax.grad(f, (0, 1)), *inputs())
    assert sizes["constant", 10_000] == sizes["constant", 100]
    more = sizes["adaptive", 10_000] - sizes["adaptive", 100]
    assert abs(more - 9900 * (2 * 8 + (name == "tsit5"))) <= 256


@pytest.mark.slow
def test_steps_without_a_bound():
    unbounded = loss_of(ReversibleAdjoint(), diffrax.Tsit5(), max_steps=None)
    bounded = loss_of(ReversibleAdjoint(), diffrax.Tsit5())
    near(jax.grad(unbounded, (0, 1))(*inputs()), jax.grad(bounded, (0, 1))(*inputs()))
    assert temp_bytes(jax.grad(unbounded, (0, 1)), *inputs()) < 20_000


def contracting(adjoint, **settings):
    """The loss of a solve that forgets where it has come from."""
    term = diffrax.ODETerm(lambda t, y, rate: -rate * (y + y**3 - jnp.sin(t)))
    how = dict(terms=term, solver=diffrax.Heun(), t1=1.0, dt0=0.01, max_steps=100)
    return loss_of(adjoint, **how | settings)


def test_a_way_back_that_misses_its_start_is_told():
    """For what the gradient is taken of does not matter."""
    args = jnp.array(40.0), jnp.ones(2)

    def gradient(argnums, **settings):
        f = contracting(ReversibleAdjoint(**settings))
        return jax.block_until_ready(jax.jit(jax.grad(f, argnums))(*args))

    told = r"At carry.y, .* is off by .*`checkpoints=`, .*`max_steps`"
    for argnums in (0, 1):
        with pytest.raises(jax.errors.JaxRuntimeError, match=told):
            gradient(argnums)
    gradient(0, check=False)
    theirs = contracting(diffrax.RecursiveCheckpointAdjoint())
    expected = jax.jit(jax.grad(theirs, (0, 1)))(*args)
    near(gradient((0, 1), checkpoints=10), expected)


@pytest.mark.slow
def test_steps_that_cannot_be_undone_are_told():
    """Euler's method comes to rest in a single step."""
    rest = diffrax.ODETerm(lambda t, y, rate: -rate * y + 0.1 * jnp.sin(y))
    how = dict(terms=rest, solver=diffrax.Euler(), dt0=0.1)
    f = contracting(ReversibleAdjoint(checkpoints=100), **how)
    args = jnp.array(10.0), jnp.ones(2)
    with pytest.raises(Exception, match="does not come to the state from which"):
        jax.block_until_ready(jax.jit(jax.grad(f, (0, 1)))(*args))


@pytest.mark.slow
def test_a_long_solve_is_that_of_diffrax():
    """Its steps contract, but the solution does not move away from that of Diffrax."""
    w = 2 * jnp.asarray(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
    term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y) - y + jnp.sin(7 * t))
    how = dict(terms=term, t1=40.0, max_steps=4096, saveat=diffrax.SaveAt(steps=True))
    for controller in ("constant", "adaptive"):
        found, expected = (
            loss_of(adjoint, diffrax.Tsit5(), controller, **how)(w, inputs()[1])
            for adjoint in (ReversibleAdjoint(), diffrax.DirectAdjoint())
        )
        near(found, expected)


@pytest.mark.slow
def test_derivatives_where_nothing_moves():
    """There the value is found at once; its tangents take as long as elsewhere."""
    still = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ jnp.sin(y)))
    how = dict(terms=still, dt0=0.2)
    found, expected = (
        jax.jit(functools.partial(hessian, loss_of(adjoint, diffrax.Heun(), **how)))
        for adjoint in (ReversibleAdjoint(), diffrax.DirectAdjoint())
    )
    args = inputs()[0], jnp.zeros((1, WIDTH))
    near(found(*args), expected(*args))


@pytest.mark.slow
def test_a_solve_goes_on_from_the_state_of_another():
    def halves(adjoint):
        def loss(w, y0):
            term, solver = diffrax.ODETerm(field), diffrax.Tsit5()
            solve = functools.partial(
                diffrax.diffeqsolve, term, solver, dt0=0.1, args=w, adjoint=adjoint
            )
            saveat = diffrax.SaveAt(t1=True, solver_state=True)
            first = solve(t0=0.0, t1=1.0, y0=y0, saveat=saveat)
            state = first.solver_state
            second = solve(t0=1.0, t1=2.0, y0=first.ys[-1], solver_state=state)
            return jnp.sum(second.ys**2)

        return jax.jit(jax.grad(loss, (0, 1)))(*inputs())

    near(halves(ReversibleAdjoint()), halves(diffrax.DirectAdjoint()))


def refused(match, solver=None, adjoint=None, error=ValueError, **settings):
    f = loss_of(adjoint or ReversibleAdjoint(), solver or diffrax.Tsit5(), **settings)
    with pytest.raises(error, match=match):
        f(*inputs())


def test_what_cannot_be_reversed():
    kvaerno = dict(solver=diffrax.Kvaerno3(), controller="adaptive")
    refused("Kvaerno3 solves an equation at each step", **kvaerno)
    refused("LeapfrogMidpoint computes a step from more", diffrax.LeapfrogMidpoint())
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


def test_a_path_that_gives_other_numbers():
    path = diffrax.UnsafeBrownianPath((), jax.random.key(0))
    noise = diffrax.ControlTerm(lambda t, y, args: 0.1, path)
    terms = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: -y), noise)
    how = diffrax.Heun(), 0.0, 1.0, 0.1, jnp.array(1.0)
    with pytest.raises(ValueError, match="`UnsafeBrownianPath` gives other numbers"):
        diffrax.diffeqsolve(terms, *how, adjoint=ReversibleAdjoint())


def test_what_it_takes():
    with pytest.raises(ValueError, match="`checkpoints`"):
        ReversibleAdjoint(checkpoints=0)
    with pytest.raises(TypeError, match="`checkpoints`"):
        ReversibleAdjoint(checkpoints=1.5)
    with pytest.raises(TypeError, match="`check`"):
        ReversibleAdjoint(check="no")
