"""Operations in a kernel that were others, interpreted, beside `lax.scan`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close, assert_raises, assert_same

FUSED = el.Fused(interpret=True)


def halved_until_small(h, x):
    """A while loop that each row leaves at its own time, and that counts."""
    halve = lambda c: (c[0] / 2, c[1] + 1, c[2] * 1.5)
    small, count, growth = lax.while_loop(
        lambda c: c[0] > 0.5, halve, (jnp.abs(h), 0, 1.0)
    )
    return jnp.sin(h + x) * 4, (small, count, growth)


def root_of_x(h, x):
    """A while loop that reads `x` alone."""
    root = lax.while_loop(lambda r: r * r > x + 0.1, lambda r: r * 0.8, x)
    return h * 0.9, root


def tokens(h, x):
    """Indices that are narrower than the table, and out of its bounds."""
    at = (x * 100).astype(jnp.uint8)
    table = jnp.arange(300.0)
    return h * 0.9, (jnp.take(table, at), table[at.astype(jnp.int8)])


def moved(h, x):
    pair = jnp.stack([h, x])
    return h + x, (jnp.tile(pair, 2), jnp.ravel(pair[:, None] * jnp.ones((1, 3)), "F"))


def tails(h, x):
    return h * 0.5, (jax.scipy.special.log_ndtr(-6 - x), lax.lgamma(x / h), jnp.sign(h))


def interpolated(h, x):
    at = jnp.linspace(0.0, 3.0, 5)
    return h * 0.9, (jnp.interp(x, at, at**2), jnp.searchsorted(at, x))


def empty(h, x):
    pair = jnp.stack([h, x])
    return h + jnp.sum(pair[2:]), jnp.max(pair[:0], initial=-1.0)


def without_entries(h, x):
    none, at = jnp.zeros((0, 3)) + h, jnp.asarray(x, int)
    return h * 0.5, (jnp.cumsum(none), lax.dynamic_slice(none.T, (at, at), (2, 0)))


def chosen(h, x):
    """A choice by numbers below the range of it, and above."""
    at = (x * 2).astype(jnp.int32) - 1
    return h * 0.5, lax.select_n(at, h, h * 2, h * 3)


def padded(h, x):
    """Numbers before, behind and between others, with one that is none among them."""
    pair = jnp.stack([h, jnp.where(x > 1, jnp.nan, x)])
    around = lax.pad(pair, -1.0, [(1, 2, 1)])
    return h * 0.5, (around, jnp.maximum(pair, 0.5), jnp.minimum(0.5, pair))


STEPS = [
    halved_until_small,
    padded,
    root_of_x,
    tokens,
    moved,
    tails,
    interpolated,
    empty,
    without_entries,
    chosen,
]


def run(step: Callable[..., Any], schedule: Any) -> Any:
    hs, xs = jnp.linspace(0.3, 9.0, 5), jnp.linspace(0.1, 2.9, 15).reshape(5, 3)
    one = lambda h, x: el.Scan(step, schedule=schedule)(h, x)
    return jax.jit(jax.vmap(one))(hs, xs)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_values_are_those_of_the_engine(step):
    assert_close(run(step, FUSED), run(step, el.StoreAll()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_cotangents_of_indices_out_of_bounds_are_those_of_jax(mode):
    at = jnp.array([5, -7, 2])

    def gradient(schedule):
        step = lambda h, x: (h * x, h.at[at].get(mode=mode))
        scan = el.Scan(step, schedule=schedule)
        f = lambda h: jax.vmap(lambda h: scan(h, jnp.ones(2))[1])(h)
        _, pull = jax.vjp(f, jnp.ones((5, 4)))
        return pull(jnp.arange(30.0).reshape(5, 2, 3))

    assert_close(gradient(FUSED), gradient(el.StoreAll()))


def test_the_greatest_are_in_total_order():
    rows = np.array([[1, np.nan, 3], [-np.inf, -0.0, 0.0]], np.float32)

    def greatest(schedule):
        step = lambda h, x: (h, lax.top_k(x, 2))
        scan = el.Scan(step, schedule=schedule)
        xs = jnp.stack([rows, rows[::-1]], 1)
        return jax.vmap(lambda x: scan(jnp.zeros(2), x)[1])(xs)

    assert_same(greatest(FUSED), greatest(el.StoreAll()))


def test_rows_of_what_is_of_xs_alone_are_those_of_the_carry():
    step = lambda h, x: (h * 0.9, jnp.sin(x))
    scan = el.Scan(step, schedule=FUSED)
    f = lambda h, x: jnp.sum(jax.vmap(lambda h, x: scan(h, x)[0])(h, x))
    (loop,) = el.plans(jax.grad(f))(jnp.ones(64), jnp.ones((64, 3)))
    assert "64 rows of about 1 numbers" in loop.plan.kernel


def test_as_many_rows_as_entries_are_no_diagonal():
    step = lambda h, x: (h * 0.5, [x[0] + 1, x[1] * 2, x[2]])
    xs = [i + jnp.arange(32.0).reshape(2, 4, 4) for i in range(3)]
    one = lambda h, xs: el.Scan(step, schedule=FUSED)(h, xs)[1]
    ys = jax.jit(jax.vmap(one, (0, 1), 1))(jnp.ones(4), xs)
    assert_same(ys, [xs[0] + 1, xs[1] * 2, xs[2]])


def test_lgamma_is_exact_at_its_zeros():
    x = jnp.array([1, 2, 1 - 1e-5, 1 + 1e-5, 2 - 1e-5, 2 + 1e-5, 0.6, 1.4, 2.4])
    step = lambda h, x: (h * 0.5, lax.lgamma(x))
    scan = el.Scan(step, schedule=FUSED)
    found = jax.vmap(lambda x: scan(0.0, x[None])[1])(x)[:, 0]
    expected = [math.lgamma(float(one)) for one in x]
    assert_close(found, jnp.array(expected), rtol=1e-6, atol=0)


def test_keys_of_another_generator_are_refused():
    step = lambda h, key: (h + jax.random.uniform(key), None)
    make = lambda i: jax.random.split(jax.random.key(i, impl="rbg"), 3)
    keys = jax.vmap(make)(jnp.arange(5))
    wrong = lambda: jax.vmap(lambda k: el.Scan(step, schedule=FUSED)(0.0, k))(keys)
    assert_raises(wrong, "NotInKernelError: Fused: … random_bits … threefry2x32")


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_any_generator_are_carried(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), (3, 5))

    def run(scan):
        def step(c, x):
            (h, key), words = c, jax.random.key_data(x)
            new = jax.random.wrap_key_data(words + h.astype("uint32"), impl=impl)
            return (h + 1, x), (new, jax.random.clone(key))

        return jax.vmap(lambda k: scan(step, (0.0, k[0]), k), 1)(keys)

    found = run(lambda f, *args: el.Scan(f, schedule=FUSED)(*args))
    assert_same(found, run(lax.scan))


def test_seeds_of_another_generator_are_refused():
    step = lambda h, n: (h * 0.5, jax.random.key(n, impl="rbg"))
    seeds = jnp.arange(12).reshape(3, 4)
    wrong = lambda: jax.vmap(lambda n: el.Scan(step, schedule=FUSED)(0.0, n))(seeds)
    assert_raises(wrong, "NotInKernelError: Fused: … random_seed … threefry2x32")


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int16"])
def test_shifts_beyond_the_width_are_those_of_jax(dtype):
    top = np.array(jnp.iinfo(dtype).max, dtype)
    xs = jnp.array([[top, 1, top - 1], [5, top, 0]], dtype)
    by = jnp.array([[40, 3, 31], [1, 8, 200]], "uint8").astype(dtype)
    shifts = lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic

    def run(scan):
        step = lambda h, x: (h, [shift(*x) for shift in shifts])
        return jax.vmap(lambda *x: scan(step, 0.0, x)[1])(xs, by)

    assert_same(run(lambda f, *args: el.Scan(f, schedule=FUSED)(*args)), run(lax.scan))


def test_empty_arrays_are_reshaped():
    def run(scan):
        def step(h, x):
            return h * 0.5, (jnp.tile(x, (0, 2)), lax.reshape(x[:, :0], (0, 6)), x)

        xs = jnp.arange(36.0).reshape(3, 2, 2, 3)
        return jax.vmap(lambda xs: scan(step, 1.0, xs))(xs)

    assert_same(run(lambda f, *args: el.Scan(f, schedule=FUSED)(*args)), run(lax.scan))
