"""Backward rules that log have their gradients in loops, and no log."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow
from .logged import logging

pytestmark = pytest.mark.skipif(
    not hasattr(jax.custom_vjp, "defvjp_with_logs"),
    reason="JAX before 0.12 has no logs",
)

XS = jnp.linspace(0.1, 1.0, 5)
C = jnp.array([0.3, 0.2])


def _kinds(x: jax.Array, ct: jax.Array) -> Any:
    count = jnp.int32(-70_000) + (ct > 0.5).sum(dtype=jnp.int32)
    return {"ct": ct, "x": {"count": count, "is_large": ct > 0.5}}


outer = logging(_kinds)
within = logging(lambda x, ct: {"inner": 2 * ct})


def final(loop: Any, inner_loop: Any, reverse: bool) -> Callable[..., jax.Array]:
    def f(w: jax.Array, c: jax.Array) -> jax.Array:
        def step(c: jax.Array, x: jax.Array) -> Any:
            inner = lambda c, v: (within(c * v), None)
            c, _ = inner_loop(inner, c, jnp.stack([w, w]))
            return outer(c) * w + x, c * x

        c, ys = loop(step, c, XS, reverse=reverse)
        return c.sum() + ys.sum()

    return f


def ours(schedule: Any) -> Any:
    def loop(f: Any, c: Any, xs: Any, **settings: Any) -> Any:
        return el.Scan(f, schedule=schedule, **settings)(c, xs)

    return loop


CONTEXTS = {
    "plain": lambda f: f,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda w, c: jax.lax.cond(w > 0, f, f, w, c),
    "vmap": lambda f: lambda w, c: jax.vmap(f, (None, 0))(w, jnp.stack([c, 2 * c])),
}


@pytest.mark.sampled
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("schedule", "reverse"),
    [
        (el.Recursive(2), True),
        (el.Binomial(2), False),
        slow(el.StoreAll(), False),
        slow(el.Chunked(2), True),
        slow(el.Chunked(1), False),
        slow(el.Budget("1MiB", measure=False), True),
    ],
    ids=str,
)
def test_gradients_are_those_of_a_scan(schedule, reverse, context):
    def run(*loops: Any) -> Any:
        f = CONTEXTS[context](final(*loops, reverse))

        @jax.jit
        def pull(w: jax.Array, c: jax.Array) -> Any:
            out, pull = jax.vjp(f, w, c)
            return pull.with_logs(jnp.ones_like(out))

        return pull(jnp.float32(1.1), C)

    loop = ours(schedule)
    (found, log), (wanted, _) = run(loop, loop), run(jax.lax.scan, jax.lax.scan)
    is_scan_of_jax = schedule == el.StoreAll()
    assert bool(log) == is_scan_of_jax
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_derivatives_of_gradients():
    f, plain = (
        final(loop, jax.lax.scan, False) for loop in (ours(el.Chunked(2)), jax.lax.scan)
    )
    modes = lambda f: jax.jit(
        lambda w: (jax.grad(f)(w, C), jax.jacfwd(jax.grad(f))(w, C))
    )(jnp.float32(1.1))
    np.testing.assert_allclose(modes(f), modes(plain), rtol=1e-4)


@pytest.mark.parametrize("kind", [el.CheckpointedWhileLoop, el.BoundedWhileLoop])
def test_while_loops_have_gradients_and_no_log(kind):
    settings = {"max_steps": 4} if kind is el.BoundedWhileLoop else {}
    loop = kind(lambda c: c[0] < 3, lambda c: (c[0] + 1, outer(c[1])), **settings)
    _, pull = jax.vjp(lambda c: loop((0, c))[1], C)
    (found,), log = pull.with_logs(jnp.ones(2))
    wanted = jax.grad(lambda c: jnp.sin(jnp.sin(jnp.sin(c))).sum())(C)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert not log


def test_loops_that_may_end_have_gradients_and_no_log():
    def ended(c: jax.Array) -> jax.Array:
        step = lambda c, _: ((c[0] + 1, outer(c[1])), None)
        scan = el.ScanWhile(lambda c: c[0] < 3, step, max_steps=5)
        return scan((0, c))[0][1]

    settings = dict(max_steps=5, schedule=el.Recursive(2))
    body = lambda c: (c[0] + 1, outer(c[1]))
    bounded = el.BoundedWhileLoop(lambda c: c[0] < 3, body, **settings)
    plain = lambda c: jax.lax.scan(lambda c, _: (outer(c), None), c, length=3)[0]
    pulls = [jax.vjp(f, C)[1] for f in (plain, ended, lambda c: bounded((0, c))[1])]
    (wanted, _), *others = [pull.with_logs(jnp.ones(2)) for pull in pulls]
    for found, log in others:
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
        assert not log


def test_a_gradient_in_two_parts():
    scan = el.CheckpointedScan(lambda c, x: (jnp.sin(c + x), c), base=2)
    f = lambda c: scan(c, XS)[0].sum()
    forward, back = jax.fwd_and_bwd(f, argnums=0)
    out, residuals = jax.jit(forward)(C)
    np.testing.assert_allclose(out, f(C), rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(back)(residuals, jnp.ones_like(out)), jax.grad(f)(C), rtol=1e-6
    )
