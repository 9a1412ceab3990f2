"""What is known beside what is linear: JAX divides our loops and maps output by output.

The functions here compute values and tangents in one loop, as a rule of
`jax.custom_jvp` may do. The judges are `jax.lax.scan`, `jax.lax.map` and
`jax.lax.associative_scan`, which JAX divides as well.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close

pytestmark = pytest.mark.sampled

Loop = Callable[..., Any]

LENGTH = 5


def plain(step: Any, init: Any) -> Any:
    return lax.scan(step, init, None, length=LENGTH)


def scan(make: Any, step: Any, init: Any) -> Any:
    return make(step)(init, None, length=LENGTH)


def scan_while(step: Any, init: Any) -> Any:
    return el.ScanWhile(lambda c: c[0] < 100, step, max_steps=LENGTH)(init)[:2]


def within(outer: Any, step: Any, init: Any) -> Any:
    """The loop in the only step of another one."""

    def once(carry: Any, _: Any) -> Any:
        after, ys = scan(el.CheckpointedScan, step, carry)
        return after, (after, ys)

    return jax.tree.map(lambda y: y[0], outer(once)(init, None, length=1)[1])


LOOPS: dict[str, Loop] = {
    "CheckpointedScan": functools.partial(scan, el.CheckpointedScan),
    "Binomial": functools.partial(scan, el.Scan(schedule=el.Binomial(2))),
    "StoreAll": functools.partial(scan, el.Scan(schedule=el.StoreAll())),
    "SlicedScan": functools.partial(scan, el.SlicedScan(stop=LENGTH)),
    "ScanWhile": scan_while,
    "jit": jax.jit(functools.partial(scan, el.CheckpointedScan), static_argnums=0),
    "within a scan": functools.partial(within, el.CheckpointedScan),
    "Remat": lambda step, init: el.Remat(
        functools.partial(scan, el.CheckpointedScan, step)
    )(init),
}


def solver(loop: Loop) -> Callable[..., Any]:
    """A function of `d` and `b` whose rule has a loop for both derivatives."""

    def step(c: Any, _: Any) -> Any:
        return (jnp.sin(c[0]) / 2 + 1, c[1] / c[0]), c[0] * c[1]

    def pushed(c: Any, _: Any) -> Any:
        (d, b), (dd, db) = c[:2], c[2:]
        after = (jnp.cos(d) / 2 * dd, db / d - b / d**2 * dd)
        (d, b), y = step((d, b), None)
        return (d, b, *after), (y, c[0] * db + c[1] * dd)

    @jax.custom_jvp
    def solve(d: Any, b: Any) -> Any:
        return loop(step, (d, b))

    @solve.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (d, b, *dots), (y, dy) = loop(pushed, (*primals, *tangents))
        return ((d, b), y), (tuple(dots), dy)

    return solve


def loss(solve: Any) -> Callable[..., Any]:
    def value(d: Any, b: Any) -> Any:
        (c, e), y = solve(d, b)
        return jnp.sin(c) * e / (2 + c) + jnp.sum(jnp.sin(y)) / c

    return value


def batch(f: Any, d: Any, b: Any) -> Any:
    return jax.vmap(f, (None, 0))(d, jnp.stack([b, b + 1]))


def over_steps(f: Any, loop: Any, d: Any, b: Any) -> Any:
    return loop(lambda c, _: (c + f(d, c), None), b)[0]


GRADIENT = functools.partial(jax.grad, argnums=(0, 1))
CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda solve: GRADIENT(loss(solve)),
    "grad of jit": lambda solve: GRADIENT(jax.jit(loss(solve))),
    "linearize": lambda solve: lambda d, b: jax.linearize(loss(solve), d, b)[1](d, b),
    "hessian": lambda solve: jax.hessian(loss(solve), (0, 1)),
    "reverse over reverse": lambda solve: jax.jacrev(jax.jacrev(loss(solve))),
    "checkpoint": lambda solve: GRADIENT(loss(jax.checkpoint(solve))),
    "checkpoint of a loss": lambda solve: GRADIENT(jax.checkpoint(loss(solve))),
    "checkpoint that stores": lambda solve: GRADIENT(
        loss(jax.checkpoint(solve, policy=jax.checkpoint_policies.everything_saveable))
    ),
    "vmap": lambda solve: functools.partial(batch, GRADIENT(loss(solve))),
    "of vmap": lambda solve: GRADIENT(lambda d, b: jnp.sum(batch(loss(solve), d, b))),
    "in lax.scan": lambda solve: GRADIENT(
        functools.partial(over_steps, loss(solve), plain)
    ),
    "in a scan": lambda solve: GRADIENT(
        functools.partial(over_steps, loss(solve), LOOPS["Binomial"])
    ),
    "in cond": lambda solve: GRADIENT(
        lambda d, b: lax.cond(d > 0, loss(solve), lambda d, b: d * b, d, b)
    ),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_rule_computes_values_and_tangents_in_one_loop(loop, context):
    with jax.enable_x64(True):
        at = jnp.array(1.3), jnp.array(0.7)
        want, got = (
            jax.jit(CONTEXTS[context](solver(run)))(*at) for run in (plain, LOOPS[loop])
        )
        assert_close(got, want, rtol=1e-09, atol=0)


# Functions that are linear in `t`, beside results that do not depend on it.


class Layer(eqx.Module):
    w: jax.Array

    def __call__(self, c: Any) -> Any:
        return jnp.sin(c[0] * self.w), c[1] / c[0]


def stacked(is_plain: bool, d: Any, t: Any) -> Any:
    ws = jnp.array([1.0, 2.0, 3.0])
    if is_plain:
        return lax.scan(lambda c, w: (Layer(w)(c), None), (d, t), ws)[0]
    return el.StackedLayers.from_layers([Layer(w) for w in ws])((d, t))


def mapped(make: Any, is_plain: bool, d: Any, t: Any) -> Any:
    rows = jnp.array([0.1, 0.2, 0.3])
    f = lambda i: (jnp.sin(d + i), t / d * i)
    return lax.map(f, rows) if is_plain else make(f)(rows)


def summed(is_plain: bool, d: Any, t: Any) -> Any:
    make = el.ChunkedVmap(chunk_size=2, reduce="sum")
    outs = mapped(make, is_plain, d, t)
    return jax.tree.map(jnp.sum, outs) if is_plain else outs


def prefixes(is_plain: bool, d: Any, t: Any) -> Any:
    combine = lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1])
    elements = d * jnp.array([1.1, 1.2, 0.9, 0.8, 1.3]), t * jnp.arange(1.0, 6.0)
    if is_plain:
        return lax.associative_scan(combine, elements)
    return el.AssociativeScan(combine, chunk_size=2)(elements)


def checked(is_plain: bool, d: Any, t: Any) -> Any:
    f = lambda d, t: (jnp.sin(d), t / d)
    return f(d, t) if is_plain else el.DebugNonFinite(f)(d, t)


def counted(kind: Any, is_plain: bool, d: Any, t: Any) -> Any:
    after = lambda c: (jnp.sin(c[0]) / 2 + 1, c[1] / c[0])
    if is_plain:
        return lax.scan(lambda c, _: (after(c), None), (d, t), None, length=4)[0]
    body = lambda c: (c[0] + 1, after(c[1]))
    return kind(lambda c: c[0] < 4, body)((0, (d, t)))[1]


def pulled(is_plain: bool, d: Any, t: Any) -> Any:
    """Of the two cotangents of a loop, one is linear."""
    step = lambda c, _: ((jnp.sin(c[0]) / 2 + 1, jnp.sin(c[1])), None)
    loop = (
        lax.scan
        if is_plain
        else lambda f, *args, **k: el.CheckpointedScan(f)(*args, **k)
    )
    run = lambda init: loop(step, init, None, length=4)[0]
    return jax.vjp(run, (d, d / 2))[1]((d, t))[0]


BESIDE: dict[str, Callable[..., Any]] = {
    "Map": functools.partial(mapped, el.Map()),
    "ChunkedVmap": functools.partial(mapped, el.ChunkedVmap(chunk_size=2)),
    "sum": summed,
    "ForLoop": functools.partial(mapped, el.CheckpointedForLoop(base=2)),
    "StackedLayers": stacked,
    "AssociativeScan": prefixes,
    "DebugNonFinite": checked,
    "BoundedWhileLoop": functools.partial(
        counted, functools.partial(el.BoundedWhileLoop, max_steps=6)
    ),
    "CheckpointedWhileLoop": functools.partial(
        counted, functools.partial(el.CheckpointedWhileLoop, checkpoints=2)
    ),
    "cotangents": pulled,
}


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("name", BESIDE)
def test_what_is_linear_is_transposed_beside_what_is_not(name, is_jitted, is_batched):
    def transposed(is_plain: bool, d: Any) -> Any:
        def linear(t: Any) -> Any:
            known, scaled = BESIDE[name](is_plain, d, t)
            return scaled / (3 + known)

        f = jax.jit(linear) if is_jitted else linear
        out = jax.eval_shape(linear, d)
        ct = jnp.cos(jnp.arange(out.size, dtype=d.dtype)).reshape(out.shape)
        (back,) = jax.linear_transpose(f, d)(ct)
        return back

    ds = jnp.array([1.3, 0.8])
    run = lambda is_plain: (
        jax.vmap(functools.partial(transposed, is_plain))(ds)
        if is_batched
        else transposed(is_plain, ds[0])
    )
    np.testing.assert_allclose(run(False), run(True), rtol=1e-5)


def test_what_is_known_is_run_once_more_and_not_stored():
    """Of `n` steps, the known part runs `n`, and the transpose runs what it needs."""
    count = [0]

    def note(x: Any) -> Any:
        count[0] += 1
        return x

    def noted(x: Any) -> Any:
        return jax.pure_callback(note, x, x, vmap_method="sequential")

    noted_rule = jax.custom_jvp(noted)
    noted_rule.defjvp(lambda p, t: (noted(p[0]), t[0]))
    step = lambda c, _: ((jnp.sin(noted_rule(c[0])) / 2 + 1, c[1] / c[0]), None)

    def linear(t: Any) -> Any:
        known, scaled = el.CheckpointedScan(step)((jnp.float32(1.3), t), length=8)[0]
        return scaled / known

    jax.block_until_ready(jax.linear_transpose(linear, jnp.float32(1.0))(1.0))
    plan = el.CheckpointedScan(step).plan(
        (jnp.float32(1.3), jnp.float32(0.0)), length=8
    )
    assert 8 < count[0] <= 8 + plan.evaluations


def test_an_output_that_no_unknown_input_reaches_is_known():
    def linear(t: Any) -> Any:
        (_, unused), y = el.CheckpointedScan(lambda c, _: ((c[0] / 2, c[1]), c[0]))(
            (1.0, t), length=3
        )
        return unused / jnp.sum(y)

    (ct,) = jax.linear_transpose(linear, jnp.float32(1.0))(jnp.float32(1.0))
    np.testing.assert_allclose(ct, 1 / 1.75)


def test_primitives_of_others_are_divided_as_ever():
    """`jax.checkpoint` asks its policy about them, and they run as often."""
    f = lambda x: jnp.sum(
        el.CheckpointedScan(lambda c, _: (jnp.sin(c), c))(x, length=3)[1]
    )
    for policy in (None, jax.checkpoint_policies.everything_saveable):
        got = jax.grad(jax.checkpoint(f, policy=policy))(0.3)
        np.testing.assert_allclose(got, jax.grad(f)(0.3), rtol=1e-6)
