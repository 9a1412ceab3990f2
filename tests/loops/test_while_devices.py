"""While loops inside `jax.shard_map`, each device stopping at its own time."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close
from ..marks import slow

pytestmark = pytest.mark.sampled

LOOPS = {
    "bounded": functools.partial(el.BoundedWhileLoop, max_steps=9, base=2),
    "checkpointed": functools.partial(el.CheckpointedWhileLoop, checkpoints=3),
    "one slot": functools.partial(el.CheckpointedWhileLoop, checkpoints=1),
}
kinds = pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)

P = jnp.float32(1.3)
COUNTS = jnp.arange(8)
XS = jnp.linspace(0.1, 1, 8)


class Body(eqx.Module):
    p: jax.Array

    def __call__(self, carry):
        left, x, steps = carry
        return left - 1, jnp.sin(x * self.p), steps + 1


def run(kind, p, count, x):
    return kind(lambda carry: carry[0] > 0, Body(p))((count, x, 0))[1]


def by_hand(p, xs):
    out = []
    for count, x in zip(COUNTS.tolist(), xs, strict=True):
        for _ in range(count):
            x = jnp.sin(x * p)
        out.append(x)
    return jnp.stack(out)


def over_devices(one):
    """Two examples on each of four devices."""
    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("device")
    specs = (PartitionSpec(), split, split)
    mapped = jax.vmap(one, (None, 0, 0))
    return jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=split)


@kinds
def test_gradients(kind):
    sharded = over_devices(functools.partial(run, kind))
    loss = lambda p, xs: jnp.sum(sharded(p, COUNTS, xs))
    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(P, XS)
    expected = jax.value_and_grad(lambda *args: jnp.sum(by_hand(*args)), (0, 1))(P, XS)
    assert_close(actual, expected, atol=0)


def test_forward_mode():
    sharded = over_devices(functools.partial(run, el.WhileLoop))
    along = lambda f: jax.jit(lambda: jax.jvp(f, (P,), (jnp.ones(()),)))()
    actual = along(lambda p: sharded(p, COUNTS, XS))
    for a, e in zip(actual, along(lambda p: by_hand(p, XS)), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


@jax.custom_jvp
def sin_of_product(p, x):
    return jnp.sin(p * x)


@sin_of_product.defjvp
def _(primals, tangents):
    (p, x), (dp, dx) = primals, tangents
    return sin_of_product(p, x), jnp.cos(p * x) * (dp * x + p * dx)


@jax.custom_vjp
def sin_by_rule(p, x):
    return jnp.sin(p * x)


sin_by_rule.defvjp(
    lambda p, x: (sin_by_rule(p, x), (p, x)),
    lambda kept, ct: tuple(ct * jnp.cos(kept[0] * kept[1]) * k for k in kept[::-1]),
)


def scanned(schedule):
    def run(p, x):
        inner = el.Scan(lambda c, _: (jnp.sin(p * c), None), schedule=schedule)
        return inner(x, length=2)[0]

    return run


def ended(p, x):
    inner = lambda c: (c[0] + 1, jnp.sin(p * c[1]))
    return el.CheckpointedWhileLoop(lambda c: c[0] < 2, inner)((0, x))[1]


# Functions of what is the same on all devices, and of what is not.
STEPS = {
    "product": lambda p, x: jnp.sin(p * x),
    "computed from it alone": lambda p, x: jnp.sin((jnp.exp(p) + 1) * x),
    "branch": lambda p, x: jax.lax.cond(x > 0.5, lambda: p * x, lambda: p + x),
    "branch by it": lambda p, x: x * jax.lax.cond(p > 0, lambda: p, lambda: -p),
    "call": lambda p, x: jax.jit(lambda p, x: jnp.sin(p * x))(p, x),
    "rule": sin_of_product,
    "rule of it alone": lambda p, x: jax.nn.relu(p) * x,
    "residuals": lambda p, x: el.Remat(lambda x: jnp.sin(p * x))(x),
    "scan": lambda p, x: jax.lax.fori_loop(0, 2, lambda i, c: jnp.sin(p * c), x),
    "planned scan": scanned(el.Recursive(2)),
    "binomial scan": scanned(el.Binomial(1)),
    "while loop": ended,
    "map": lambda p, x: el.ChunkedVmap(lambda y: jnp.sin(p * x * y), 2)(XS[:3]).sum(),
    "gradient": lambda p, x: jax.grad(functools.partial(ended, p))(x),
}
EVERY_DAY = ("rule", "planned scan", "while loop")
of_all_modes = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of grad": lambda f: jax.jacrev(jax.grad(f)),
    "hessian": jax.hessian,
    "jvp": lambda f: lambda p, xs: jax.jvp(f, (p, xs), (p, xs))[1],
    "batch": lambda f: (
        lambda p, xs: jax.vmap(jax.grad(f), (0, None))(jnp.stack([p, 2 * p]), xs)
    ),
}


def check_closed_over(kind, step, mode):
    """What a body closes over is the same on all devices, which stop apart."""

    def one(p, count, x):
        body = lambda carry: (carry[0] - 1, step(p, carry[1]) + 0.1)
        return kind(lambda carry: carry[0] > 0, body)((count, x))[1]

    def total(run):
        return lambda p, xs: jnp.sum(run(p, COUNTS, xs) * XS)

    actual, expected = (
        jax.jit(mode(total(f)))(P, XS)
        for f in (over_devices(one), jax.vmap(one, (None, 0, 0)))
    )
    assert_close(actual, expected, rtol=1e-3, atol=1e-4)


# The weekly test below has all.
@pytest.mark.parametrize("name", EVERY_DAY)
def test_what_is_closed_over_is_the_same_on_all_devices(name):
    check_closed_over(LOOPS["checkpointed"], STEPS[name], of_all_modes["grad"])


@pytest.mark.parametrize("mode", of_all_modes.values(), ids=of_all_modes)
@pytest.mark.parametrize("kind", ["bounded", "one slot"])
def test_every_mode_of_what_is_closed_over(kind, mode):
    check_closed_over(LOOPS[kind], STEPS["product"], mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", of_all_modes.values(), ids=of_all_modes)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_mode_of_every_step(step, mode):
    check_closed_over(LOOPS["checkpointed"], step, mode)


def run_by_rule(kind, p, count, x):
    body = lambda carry: (carry[0] - 1, sin_by_rule(p, carry[1]))
    return kind(lambda carry: carry[0] > 0, body)((count, x))[1]


def test_what_would_make_devices_wait_for_each_other():
    sharded = over_devices(functools.partial(run_by_rule, LOOPS["bounded"]))
    with pytest.raises(
        ValueError, match="arrays that are the same on all of them"
    ) as e:
        jax.grad(lambda p: jnp.sum(sharded(p, COUNTS, XS)))(P)
    assert """pass `jax.lax.pcast(x, ('device',), to="varying")`""" in str(e.value)


def test_the_advice_of_that_error_helps():
    def varied(p, count, x):
        p = jax.lax.pcast(p, "device", to="varying")
        return run_by_rule(LOOPS["bounded"], p, count, x)

    loss = lambda p: jnp.sum(over_devices(varied)(p, COUNTS, XS))
    expected = jax.grad(lambda p: jnp.sum(by_hand(p, XS)))(P)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(P), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "schedule",
    [el.Binomial(3), slow(el.Recursive(2)), slow(el.Chunked(3, batch=2))],
    ids=str,
)
def test_a_scan_ends_at_its_own_time_on_each_device(schedule):
    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    h = jnp.array([3.0, 0.9, 0.5, 2.0])

    def on_device(w, h):
        w = jax.lax.pcast(w, ("device",), to="varying")
        far = lambda c: jnp.abs(c).sum() > 0.6
        step = lambda c, _: (jnp.tanh(w * c), c)
        last, ys, steps = el.ScanWhile(far, step, max_steps=9, schedule=schedule)(h)
        return last, ys, steps[None]

    at = PartitionSpec
    specs = at("device"), at(None, "device"), at("device")
    on_all = jax.shard_map(
        on_device, mesh=mesh, in_specs=(at(), specs[0]), out_specs=specs
    )

    def loss(w, h):
        last, ys, steps = on_all(w, h)
        return (last**2).sum() + ys.sum(), steps

    def by_hand(w, h):
        def step(c, _):
            runs = jnp.abs(c) > 0.6
            return jnp.where(runs, jnp.tanh(w * c), c), (jnp.where(runs, c, 0), runs)

        last, (ys, runs) = jax.lax.scan(step, h, length=9)
        return (last**2).sum() + ys.sum(), runs.sum(0)

    one, other = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(0.8, h)
        for f in (loss, by_hand)
    )
    assert one[0][1].tolist() == [3, 2, 0, 3]
    assert_close(one, other, rtol=1e-5, atol=0)
