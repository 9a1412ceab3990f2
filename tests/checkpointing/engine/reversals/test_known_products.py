"""Products that are kept for the reversal of a block, and not computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqloop as el
from eqloop.checkpointing import trace_step
from eqloop.checkpointing.engine.reversals._known_products import products_of

from ....marks import slow, slow_if

pytestmark = pytest.mark.sampled

WIDTH, LENGTH = 16, 13
W = jnp.sin(jnp.arange(WIDTH * WIDTH * 1.0)).reshape(WIDTH, WIDTH) / WIDTH**0.5
HS = jnp.cos(jnp.arange(WIDTH * 1.0))
XS = jnp.sin(jnp.arange(LENGTH * WIDTH * 1.0)).reshape(LENGTH, WIDTH)


def network(w, h, x):
    """A rule of its own within, and a product that is only added."""
    hidden = jax.nn.relu(w @ h + x)
    return h + 0.1 * jnp.tanh(hidden @ w), w @ x


def two_in_one(w, h, x):
    return jnp.tanh(w @ h + w.T @ x), h[:2]


def read_twice(w, h, x):
    product = w @ h
    return jnp.sin(product) + 0.1 * product * x, None


def squared(w, h, x):
    outer = jnp.outer(h, x)
    return jnp.tanh((outer @ outer) @ w @ h), None


def accumulated(w, carry, x):
    """Slots hold the first leaf alone."""
    h, total = carry
    h = jnp.tanh(w @ h + x)
    return (h, total + jnp.sum(h) * 0.1), None


STEPS = [network, two_in_one, read_twice, squared, accumulated]
LEVELS = el.Recursive(4, batch=4)


def of_loop(step, schedule=None, **settings):
    """Numbers that all leaves of a loop's results are in."""

    def run(w, h, xs):
        init = (h, jnp.zeros(())) if step is accumulated else h
        f = lambda carry, x: step(w, carry, x)
        if schedule is None:
            after, ys = jax.lax.scan(
                f, init, xs, reverse=settings.get("reverse", False)
            )
        else:
            after, ys = el.Scan(f, schedule=schedule, **settings)(init, xs)
        leaves = jax.tree.leaves((after, ys))
        weights = [jnp.cos(jnp.arange(x.size)).astype(x.dtype) for x in leaves]
        return sum(jnp.vdot(w, x) for w, x in zip(weights, leaves, strict=True))

    return run


def gradient(run):
    return jax.grad(run, (0, 1, 2))


MODES = {
    "gradient": gradient,
    "hessian": lambda f: jax.hessian(lambda h: f(W, h, XS)),
    "forward over reverse": lambda f: (
        lambda w, h, xs: jax.jvp(lambda *a: gradient(f)(*a), (w, h, xs), (w, h, xs))[1]
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda w, h, xs: sum(jnp.sum(jnp.sin(g)) for g in gradient(f)(w, h, xs))
    ),
    "a batch": lambda f: jax.vmap(gradient(f), (None, 0, None)),
    "a batch of weights": lambda f: jax.vmap(gradient(f), (0, None, None)),
}
INPUTS = {
    "hessian": (HS,),
    "a batch": (W, jnp.stack([HS, 2 * HS]), XS),
    "a batch of weights": (jnp.stack([W, W.T]), HS, XS),
}


def assert_equal(found, expected, rtol=1e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        atol = rtol * float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def compared(step, mode="gradient", schedule=LEVELS, **settings):
    derivative = MODES[mode]
    inputs = INPUTS.get(mode, (W, HS, XS))
    plain = {k: v for k, v in settings.items() if k == "reverse"}
    runs = of_loop(step, schedule, **settings), of_loop(step, **plain)
    assert_equal(*(jax.jit(derivative(run))(*inputs) for run in runs))


@pytest.mark.parametrize("step", STEPS)
def test_gradients(step):
    compared(step)


@pytest.mark.parametrize("mode", slow_if("hessian".__ne__, list(MODES)[1:]))
@pytest.mark.parametrize("step", [network, slow(accumulated)])
def test_modes(step, mode):
    compared(step, mode)


@pytest.mark.parametrize(
    "schedule", [el.Chunked(4, batch=5), slow(el.Binomial(3, block=3))], ids=str
)
def test_schedules(schedule):
    compared(network, schedule=schedule)


@pytest.mark.parametrize(
    "settings",
    [
        dict(reverse=True),
        slow(dict(unroll=2)),
        dict(policy=jax.checkpoint_policies.dots_saveable),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings):
    compared(two_in_one, **settings)


def test_half_precision():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (W, HS, XS))
    run = of_loop(two_in_one, LEVELS)
    found = jax.jit(gradient(run))(*half)
    assert {x.dtype for x in found} == {jnp.dtype("bfloat16")}
    expected = jax.jit(gradient(of_loop(two_in_one)))(*half)
    to_float = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    assert_equal(to_float(found), to_float(expected), rtol=0.05)


def kept(step, width=WIDTH):
    """The shapes of what may be kept of a step."""
    types = [jax.ShapeDtypeStruct((width,), jnp.float32)]
    w = jnp.ones((width, width))
    f = lambda carry, x: tuple(map(jax.tree.leaves, step(w, *carry, *x)))
    traced, _ = trace_step(f, types, types)
    found = products_of(traced)
    return None if found is None else [aval.shape for aval in found.types]


def test_what_is_kept():
    assert kept(network) == [(16,)] * 3
    # The sum of both takes no more room than one of them.
    assert kept(two_in_one) == kept(read_twice) == [(16,)]
    assert kept(squared) == [(16, 16), (16, 16), (16,)]
    # Nor is it kept in the place of one that is read elsewhere, too.
    added = lambda w, h, x: ((product := w @ h) * (product + w @ x), None)
    assert kept(added) == [(16,)] * 2
    # Of so few terms each sum is quickly computed again.
    assert kept(read_twice, 15) is None
    assert kept(lambda w, h, x: (jnp.sin(w[0] * h + w @ w @ w[0]), x)) is None


@pytest.mark.parametrize(
    ("step", "least"),
    [
        # By the primal, where steps are run again, and for the cotangents of both
        # factors.
        (read_twice, 1 + 1 + 2),
        (two_in_one, 2 + 2 + 4),
        # Of one no derivative needs the value, and nobody computes it twice.
        (network, 3 + 2 + 6),
    ],
)
def test_no_product_is_computed_where_a_step_is_linearised(step, least):
    run = jax.jit(gradient(of_loop(step, LEVELS)))
    # A number of steps that blocks divide: all of them are reversed by one loop.
    assert run.lower(W, HS, XS[:12]).compile().as_text().count(" dot(") == least


@pytest.mark.slow
def test_shards():
    mesh = jax.make_mesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jnp.stack([HS * i for i in range(8)])

    def derivative(schedule):
        run = jax.vmap(gradient(of_loop(network, schedule)), (None, 0, None))
        specs = (P(), P("device"), P())
        shards = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("device"))
        return jax.jit(shards)(W, batch, XS)

    assert_equal(derivative(LEVELS), derivative(None))


def test_double_precision():
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: x.astype(jnp.float64), (W, HS, XS))
        runs = of_loop(accumulated, LEVELS), of_loop(accumulated)
        assert_equal(*(jax.jit(gradient(run))(*inputs) for run in runs), rtol=1e-12)
