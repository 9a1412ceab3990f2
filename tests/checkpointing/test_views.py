"""Outputs that are a step's `x`, or a part of it: taken from `xs`, and not copied."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close, assert_same_types
from ..compiling import temp_bytes
from ..marks import slow, slow_if
from ..weights import normal

pytestmark = pytest.mark.sampled

H, XS = normal(0, (2, 6)), normal(1, (12, 6, 4), scale=0.3)
moved = lambda h, x: jnp.tanh(h + h @ x @ x.T)

STEPS: dict[str, Any] = {
    "x": lambda h, x: (moved(h, x), x),
    "in a tree": lambda h, x: (
        moved(h, x),
        {"a": x, "b": h.sum(), "c": [x, None, 3.0]},
    ),
    "alone": lambda h, x: (jnp.tanh(h), x),
    "of the same dtype": lambda h, x: (moved(h, x), x.astype(x.dtype)),
    "a slice": lambda h, x: (moved(h, x), (x[1:3], x[0], x[:, 1])),
    "in another shape": lambda h, x: (moved(h, x), (x.T, x.reshape(-1), x[::-1])),
    "and computed": lambda h, x: (moved(h, x), (x * 2, jnp.sin(x), x, moved(h, x))),
    "as the carry": lambda h, x: (x[:2, :1] + jnp.zeros((2, 6)), (x, h)),
    "a constant": lambda h, x: (moved(h, x), (jnp.ones(2), x)),
}
SCHEDULES = [
    None,
    el.Recursive(2),
    slow(el.Binomial(2)),
    slow(el.Chunked(3)),
    slow(el.Chunked(4, batch=2)),
    slow(el.Budget("1MiB", measure=False)),
]


def weigh(tree: Any) -> jax.Array:
    leaves = [jnp.cos(x) * (1 + i) for i, x in enumerate(jax.tree.leaves(tree))]
    return sum((jnp.sum(x * x) for x in leaves), jnp.zeros(()))


def everything(run: Any) -> Any:
    loss = lambda h, xs: weigh(run(h, xs))
    derive = jax.value_and_grad(loss, (0, 1))
    push = lambda h, xs: jax.jvp(run, (h, xs), (jnp.cos(h), jnp.sin(xs)))
    twice = lambda h, xs: jax.jvp(derive, (h, xs), (jnp.cos(h), jnp.sin(xs)))[1]
    many = lambda h, xs: jax.vmap(derive, (0, None))(jnp.stack([h, -h]), xs)
    each = (run, derive, push, twice, many)
    return jax.jit(lambda h, xs: [one(h, xs) for one in each])(H, XS)


def assert_agree(actual: Any, expected: Any) -> None:
    assert_same_types(actual, expected)
    assert_close(actual, expected)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "name", slow_if(lambda n: n not in ("x", "a slice", "and computed"), STEPS)
)
def test_numbers_are_those_of_a_scan(name, schedule):
    f = STEPS[name]
    ours = lambda h, xs: el.Scan(f, schedule=schedule)(h, xs)
    assert_agree(everything(ours), everything(lambda h, xs: lax.scan(f, h, xs)))


@pytest.mark.parametrize(
    "kept", [slice(None, None, 3), slow(slice(2, 7)), slice(-2, 0, -4), slice(5, 5)]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_are_kept(kept, reverse):
    f = STEPS["a slice"]
    settings = dict(start=kept.start, stop=kept.stop, step=kept.step, reverse=reverse)

    def ours(h, xs):
        scan = el.SlicedScan(f, schedule=el.Recursive(2), in_axes=2, **settings)
        return scan(h, jnp.moveaxis(xs, 0, 2))

    def theirs(h, xs):
        h, ys = lax.scan(f, h, xs, reverse=reverse)
        return h, jax.tree.map(lambda y: y[kept], ys)

    assert_agree(everything(ours), everything(theirs))


def test_axes_of_outputs_and_truncated_scans():
    f = STEPS["in another shape"]

    def ours(h, xs):
        settings = dict(in_axes=1, out_axes=(1, 0, -1), backward=el.Truncate(5))
        return el.CheckpointedScan(f, **settings)(h, jnp.moveaxis(xs, 0, 1))

    def theirs(h, xs):
        def step(state, x):
            i, h = state
            is_cut = (i > 0) & (i % 5 == 0)
            h, y = f(jnp.where(is_cut, lax.stop_gradient(h), h), x)
            return (i + 1, h), y

        (_, h), (a, b, c) = lax.scan(step, (0, h), xs)
        return h, (jnp.moveaxis(a, 0, 1), b, jnp.moveaxis(c, 0, -1))

    assert_agree(everything(ours), everything(theirs))


@pytest.mark.parametrize("length", [0, 1])
def test_short_loops_keys_and_weak_types(length):
    keys = jax.random.split(jax.random.key(0), length)
    weak = jnp.broadcast_to(jnp.asarray(2.0), length)
    step = lambda h, x: (h + x["a"], (x["a"], x["k"], x["n"]))
    xs = {"a": weak, "k": keys, "n": np.arange(length)}
    for scan in (el.Scan(step), el.CheckpointedScan(step)):
        (h, ys), (h0, ys0) = scan(0.0, xs), lax.scan(step, 0.0, xs)
        assert h == h0
        assert [y.dtype for y in ys] == [y.dtype for y in ys0]
        assert [y.weak_type for y in ys[::2]] == [y.weak_type for y in ys0[::2]]
        assert (jax.random.key_data(ys[1]) == jax.random.key_data(ys0[1])).all()


def test_a_loop_that_stops_gives_zeros_beyond_its_end():
    loop = el.ScanWhile(lambda h: h < 3, lambda h, x: (h + x, x), max_steps=6)
    _, ys, steps = loop(0.0, jnp.ones(6))
    assert steps == 3
    assert ys.tolist() == [1, 1, 1, 0, 0, 0]


def test_effects_of_a_step_with_no_other_outputs_stay():
    seen = []

    def step(h, x):
        jax.debug.callback(lambda x: seen.append(float(x)), x, ordered=True)
        return h, x

    jax.jit(lambda xs: el.CheckpointedScan(step)(0.0, xs))(jnp.arange(3.0))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("name", ["x", "in a tree", "a slice", "in another shape"])
def test_a_gradient_holds_no_copy_of_xs(name):
    h, xs = jnp.ones((8, 64)), jnp.ones((64, 64, 32))

    def temp(kind, *argnums, **settings):
        def loss(h, xs):
            h, ys = kind(STEPS[name], **settings)(h, xs)
            return jnp.sum(h) + weigh(ys)

        return temp_bytes(jax.grad(loss, argnums), h, xs)

    for schedule in (el.Recursive(3), el.Binomial(3)):
        scan = functools.partial(temp, el.Scan, schedule=schedule)
        assert scan(0, 1) < 0.25 * xs.nbytes
        assert scan(0, 1, reverse=True) < 0.25 * xs.nbytes
        sliced = functools.partial(temp, el.SlicedScan, schedule=schedule)
        assert sliced(0, 1, step=3) < 0.25 * xs.nbytes
