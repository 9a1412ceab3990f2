"""What does not depend on what is differentiated has no tangent, as by `lax.scan`."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from .marks import slow, slow_if

pytestmark = pytest.mark.sampled


def scan(schedule: Any) -> Any:
    return lambda body: (
        lambda c: el.Scan(lambda c, _: (body(c), None), schedule=schedule)(c, length=3)[
            0
        ]
    )


COND = lambda c: c[0] < 3
LOOPS = {
    "StoreAll": scan(el.StoreAll()),
    "Recursive": scan(el.Recursive(2)),
    "Binomial": scan(el.Binomial(2)),
    "Bounded": lambda body: el.BoundedWhileLoop(COND, body, max_steps=5),
    "Checkpointed": lambda body: el.CheckpointedWhileLoop(COND, body),
}
MODES = {
    "gradient": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](1.0),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_outputs_may_go_where_nothing_is_differentiated(kind):
    loop = LOOPS[kind](lambda c: (c[0] + 1, c[1] * 2.0, jnp.sin(c[2])))

    def f(x: Any) -> Any:
        count, other, out = loop((jnp.array(0), jnp.array(1.0), x))
        count = eqxi.nondifferentiable(count).astype(jnp.float32)
        return out + eqxi.nondifferentiable(other) * count

    wanted = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0)
    found = jax.jit(lambda x: {name: mode(f)(x) for name, mode in MODES.items()})(1.0)
    for name, derivative in found.items():
        assert jnp.allclose(derivative, wanted), name


@pytest.mark.parametrize("kind", LOOPS)
def test_a_leaf_that_nothing_needs_may_overflow(kind):
    """A zero that is taken back through what has overflowed is not a number."""
    loop = LOOPS[kind](lambda c: (c[0] + 1, c[1] * c[1], jnp.sin(c[2])))
    run = lambda grows, x: loop((jnp.array(0), grows, x))[2]
    grads = jax.jit(jax.grad(run, (0, 1)))(1e30, 1.0)
    wanted = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0)
    assert grads[0] == 0
    assert jnp.allclose(grads[1], wanted)


def body(c: Any) -> Any:
    return c[0] + 1, c[1] + eqxi.nondifferentiable(c[2]), c[2] + 1


BODIES = {
    "plain": body,
    "jit": jax.jit(body),
    "cond": lambda c: lax.cond(c[2] > 0, body, lambda c: c, c),
    "scan": lambda c: lax.scan(lambda c, _: (body(c), None), c, length=1)[0],
    "checkpoint": jax.checkpoint(body),
    "planned": lambda c: el.Scan(lambda c, _: (body(c), None), schedule=el.Chunked(1))(
        c, length=1
    )[0],
}


# The schedules share how they find out; whiles have ways of their own.
@pytest.mark.parametrize("kind", slow_if(("StoreAll", "Recursive").__contains__, LOOPS))
@pytest.mark.parametrize("inner", BODIES)
def test_so_may_leaves_of_the_carry(kind, inner):
    loop = LOOPS[kind](BODIES[inner])
    f = lambda x: loop((0, x, jnp.array(0.7)))[1]
    modes = jax.jit(lambda x: [derive(f)(x) for derive in MODES.values()])
    assert modes(1.2) == [1.0] * len(MODES)


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize("kind", ["StoreAll", "Recursive", "Bounded", "Checkpointed"])
def test_a_leaf_that_no_step_changes_is_what_it_was(kind, weak):
    w = 3.0 if weak else jnp.float32(3)
    loop = LOOPS[kind](lambda c: (c[0] + 1, jnp.sin(c[1]) * c[2], c[2]))
    run = lambda x: loop((0, x, w))[2]
    # Not batched, and no copy.
    assert jax.vmap(run, out_axes=None)(jnp.arange(2.0)) == 3
    kept = jnp.ones(3)
    assert loop((0, kept, kept))[2] is kept


def test_such_a_leaf_takes_no_slots():
    xs = jnp.ones((50, 4))
    step = lambda c, x: ((jnp.sin(c[0]) * x, c[1]), None)
    scan = el.CheckpointedScan(step, 4)
    with_it = scan.plan((jnp.ones(4), jnp.ones(10_000)), xs).peak_bytes
    assert with_it < 40_000


def test_a_gradient_outside_of_jit_keeps_the_very_xs():
    xs = jnp.ones((5, 3))
    scan = el.Scan(lambda h, x: (jnp.sin(h * x), None))
    _, pull = jax.vjp(lambda h: scan(h, xs)[0], jnp.ones(3))
    kept = [
        leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", 0) == (5, 3)
    ]
    assert any(leaf is xs for leaf in kept)


def jvp_of_grad(f: Any) -> Any:
    return lambda h: jax.jvp(jax.grad(f), (h,), (1.0,))[1]


@pytest.mark.parametrize("derive", [jax.grad, slow(jax.hessian), jvp_of_grad])
def test_outputs_that_nothing_needs_take_nothing_with_them(derive):
    """JAX leaves them out, of what stands in a loop for example."""
    xs = jnp.linspace(0.1, 0.9, 4)

    def final(loop: Any) -> Any:
        def inner(c: Any, y: Any) -> Any:
            return (jnp.sin(c[0] * y), c[1] + 1), (c[0] * y, c[1])

        def step(h: Any, x: Any) -> Any:
            (h, _), (ys, _) = loop(inner)((h, jnp.array(0)), xs * x)
            return h + jnp.sum(ys), None

        return lambda h: jnp.sin(loop(step)(h, xs)[0])

    ours = final(lambda f: el.CheckpointedScan(f, 2))
    theirs = final(lambda f: lambda h, xs: lax.scan(f, h, xs))
    scaled = lambda h: jax.checkpoint(ours)(h) * 1.0
    every = (theirs, ours, jax.checkpoint(ours), scaled)
    expected, *found = jax.jit(lambda h: [derive(f)(h) for f in every])(0.7)
    for actual in found:
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
