"""Loops inside `jax.shard_map` whose arrays become the same on all devices.

JAX tells apart, by their types, arrays that differ between devices and those that are
the same on all.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close

pytestmark = pytest.mark.sampled

XS = jnp.array([0.3, 0.7, -0.2, 0.5])
W = jnp.float32(1.2)


def step(w):
    """The first leaf is the same on all devices from now on, and so is the output."""

    def run(carry, _=None):
        a, b, n = carry
        return (w * 2.0, jnp.sin(b * a) + a, n + 1), w * 3.0

    return run


def scanned(**settings):
    def run(w, x):
        return el.Scan(step(w), **settings)((x, 2 * x, 0), length=5)

    return run


def by_zero(cotangent):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cotangent)


def clipped(w, x):
    """A leaf starts, and stays, the same on all devices."""
    run = lambda c, _: ((c[0] * 0.9, c[1] + c[0] * x), None)
    return el.Scan(run, backward=el.ClipCotangent(0.1))((w, x), length=5)[0][1]


def ended(w, x):
    far = lambda carry: carry[1] < 5 + x
    run = lambda c, _: ((jnp.ones(()), c[0] + c[1] * 1.5), jnp.ones(()))
    (a, b), ys, _ = el.ScanWhile(far, run, max_steps=6)((x, 2 + x))
    return a, b, ys


def ended_while(w, x):
    body = lambda c: (jnp.ones(()), c[0] + c[1] * 1.5)
    return el.BoundedWhileLoop(lambda c: c[1] < 5 + x, body, max_steps=6)((x, 2 + x))


CASES = {
    "all stored": scanned(),
    "nested": scanned(schedule=el.Recursive(2)),
    "together": scanned(schedule=el.Chunked(3, batch=2)),
    "a cotangent that is the same": scanned(backward=by_zero),
    "a cotangent of both kinds": clipped,
    "ends": ended,
    "while": ended_while,
}


@pytest.mark.parametrize("run", CASES.values(), ids=CASES)
def test_as_on_one_device(run):
    def total(w, x):
        leaves = jax.tree.leaves(run(w, x))
        return sum(jnp.sum(leaf) for leaf in leaves if leaf.dtype == x.dtype)

    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec("device")
    on_device = lambda w, x: total(w, x[0])[None] + 0 * x
    on_all = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs[1])
    loss = lambda w, xs: jnp.sum(on_all(w, xs))
    by_hand = lambda w, xs: sum(total(w, x) for x in xs)
    actual, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(W, XS) for f in (loss, by_hand)
    )
    assert_close(actual, expected, rtol=1e-5, atol=0)
