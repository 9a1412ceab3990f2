"""Leaves of all kinds: static ones, Python numbers, weak types, keys, none at all.

powerpax has `Static` to wrap what is no array on its way through a loop. Here nothing
needs wrapping.
"""

import enum
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow
from ..weights import without_key

pytestmark = pytest.mark.sampled


class Colour(enum.Enum):
    RED = "red"


XS = jnp.arange(4.0)


# Static leaves


@pytest.mark.parametrize("static", ["relu", jnp.tanh, Colour.RED, None, int, object()])
def test_static_leaves_reach_f_and_come_back_as_they_are(static):
    seen = []

    def f(carry, x):
        seen.extend([carry["s"], x["s"]])
        return {"h": carry["h"] + x["h"], "s": carry["s"]}, {"s": x["s"], "h": x["h"]}

    init, xs = {"h": 0.0, "s": static}, {"h": XS, "s": static}
    carry, ys = el.CheckpointedScan(f, base=2)(init, xs)
    assert all(leaf is static for leaf in seen)
    assert carry["s"] is static
    assert ys["s"] is static
    assert carry["h"] == 6


def test_static_leaves_decide_what_is_compiled():
    activations = {"tanh": jnp.tanh, "relu": jax.nn.relu}

    def f(carry, x):
        h, name = carry
        return (activations[name](h + x), name), None

    run = eqx.filter_jit(el.Scan(f))
    for name, activation in activations.items():
        (h, same_name), _ = run((0.0, name), XS)
        expected = 0.0
        for x in XS:
            expected = activation(expected + x)
        np.testing.assert_allclose(h, expected, rtol=1e-6)
        assert same_name == name


def test_static_leaves_that_are_new_in_ys():
    _, ys = el.Scan(lambda c, x: (c, {"s": "new", "f": jnp.tanh, "n": None}))(0, XS)
    assert ys == {"s": "new", "f": jnp.tanh, "n": None}


def test_modules_in_carry_and_xs():
    linear = without_key(eqx.nn.Linear, 2, 2)
    stacked = jax.tree.map(
        lambda leaf: jnp.stack([leaf, 2 * leaf]) if eqx.is_array(leaf) else leaf, linear
    )
    mlp = without_key(eqx.nn.MLP, 2, 2, 3, 1)

    def f(carry, layer):
        h, mlp = carry
        return (mlp(layer(h)), mlp), layer

    (h, same_mlp), layers = el.CheckpointedScan(f)((jnp.ones(2), mlp), stacked)
    expected = mlp(linear(jnp.ones(2)))
    second = jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, linear)
    np.testing.assert_allclose(h, mlp(second(expected)), rtol=1e-5)
    assert eqx.tree_equal(same_mlp, mlp)
    assert eqx.tree_equal(layers, stacked)


def test_state_of_equinox_in_the_carry():
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros(()))

        def __call__(self, x, state):
            count = state.get(self.index) + x
            return count, state.set(self.index, count)

    counter, state = eqx.nn.make_with_state(Counter)()

    def f(state, x):
        count, state = counter(x, state)
        return state, count

    state, counts = el.CheckpointedScan(f, base=2)(state, XS)
    assert state.get(counter.index) == 6
    np.testing.assert_array_equal(counts, [0, 1, 3, 6])


def test_no_leaves_at_all():
    calls = []
    scan = el.Scan(lambda carry, x: (calls.append(x) or carry, ()))
    assert scan(None, length=3) == (None, ())
    assert scan({}, None, length=0) == ({}, ())
    assert calls == [None, None]


# Python numbers


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j, float("nan")])
def test_a_number_that_stays_the_same_is_static(number):
    def f(carry, x):
        n, h = carry
        assert type(n) is type(number)
        return (n, h + x), None

    (n, h), _ = el.Scan(f)((number, 0.0), XS)
    assert type(n) is type(number)
    assert h == 6


def test_a_static_number_can_do_what_no_array_can():
    def f(carry, x):
        n, h = carry
        return (n, h + jnp.ones(n)), ["x"] * n

    (_, h), ys = el.Scan(f)((2, jnp.zeros(2)), XS)
    np.testing.assert_array_equal(h, [4, 4])
    assert ys == ["x", "x"]


@pytest.mark.parametrize(
    "f",
    [
        lambda c, x: (c + x, c),
        lambda c, x: (c + 1, c),
        lambda c, x: (c * 0.5, c * x),
        lambda c, x: (x, c),
        lambda c, x: (0.25, c),
        lambda c, x: (jnp.float32(1), c),
    ],
)
@pytest.mark.parametrize("init", [1, 1.5])
def test_a_number_that_changes_is_what_it_is_in_lax_scan(f, init):
    carry, ys = el.Scan(f)(init, XS)
    expected_carry, expected_ys = jax.lax.scan(f, jnp.asarray(init), XS)
    np.testing.assert_allclose(carry, expected_carry)
    np.testing.assert_allclose(ys, expected_ys)
    assert carry.dtype == expected_carry.dtype
    assert ys.dtype == expected_ys.dtype


def test_numbers_that_depend_on_each_other():
    def f(carry, x):
        _, b, c, d = carry
        return (b, c, x, d), None

    carry, _ = el.Scan(f)((1.0, 2.0, 3.0, 4.0), XS)
    assert carry == (1, 2, 3, 4)
    assert [isinstance(leaf, jax.Array) for leaf in carry] == [True] * 3 + [False]


def test_a_number_on_which_f_calls_array_methods():
    carry, _ = el.Scan(lambda c, x: (c.at[()].set(x).astype(float), c.shape))(0.0, XS)
    assert carry == 3


def test_numbers_in_ys_are_stacked():
    _, ys = el.Scan(lambda c, x: (c, {"n": 2, "np": np.float32(3), "b": True}))(0, XS)
    _, expected = jax.lax.scan(lambda c, x: (c, {"n": 2, "b": True}), 0, XS)
    np.testing.assert_array_equal(ys["n"], expected["n"])
    np.testing.assert_array_equal(ys["np"], [3, 3, 3, 3])
    assert ys["n"].dtype == expected["n"].dtype
    assert ys["b"].dtype == bool


def test_numpy_leaves_are_arrays():
    def f(carry, x):
        assert isinstance(carry["a"], jax.Array)
        assert isinstance(x, jax.Array)
        return {"a": carry["a"] + x, "s": carry["s"] + 1}, x

    init = {"a": np.zeros(2, np.float32), "s": np.int32(0)}
    carry, ys = el.CheckpointedScan(f)(init, np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(carry["a"], [3, 3])
    assert carry["s"] == 3
    assert ys.shape == (3, 2)


# Types of the carry


def test_weak_types_are_promoted():
    def f(c, x):
        return {"a": c["b"] * x, "b": c["b"] + x.astype(jnp.bfloat16)}, None

    init = {"a": jnp.asarray(0), "b": jnp.asarray(1.0)}
    assert init["a"].weak_type
    assert init["b"].weak_type
    with jax.numpy_dtype_promotion("standard"):
        carry, _ = el.Scan(f)(init, XS)
        expected, _ = jax.lax.scan(f, init, XS)
    assert carry["a"].dtype == expected["a"].dtype == jnp.float32
    assert carry["b"].dtype == expected["b"].dtype
    np.testing.assert_allclose(carry["a"], expected["a"])


@pytest.mark.parametrize(
    ("legacy", "either_width"),
    [(False, False), (True, True), slow(False, True), slow(True, False)],
    indirect=["either_width"],
)
@pytest.mark.usefixtures("either_width")
def test_keys_anywhere(legacy):
    make = jax.random.PRNGKey if legacy else jax.random.key
    init = make(0)
    xs = jax.random.split(make(1), 5)

    def f(key, x):
        key, sub = jax.random.split(key)
        return key, (jax.random.normal(sub) + jax.random.normal(x), sub)

    actual = el.CheckpointedScan(f, base=2)(init, xs)
    expected = jax.lax.scan(f, init, xs)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data if is_key else lambda x: x
        np.testing.assert_allclose(data(a), data(e), rtol=1e-6)


# What f may be


class Cell(eqx.Module):
    weight: jax.Array

    def __call__(self, h, x):
        return jnp.tanh(self.weight * h + x), h

    def other(self, h, x):
        return jnp.tanh(self.weight * h + x), h


def plain(weight, h, x):
    return jnp.tanh(weight * h + x), h


WEIGHT = jnp.array(0.5)


@functools.cache
def expected_slope():
    def loss(weight):
        carry, ys = jax.lax.scan(functools.partial(plain, weight), 0.0, XS)
        return carry + jnp.sum(ys)

    return jax.jit(jax.grad(loss))(WEIGHT)


@pytest.mark.parametrize(
    "make",
    [
        Cell,
        lambda weight: Cell(weight).other,
        lambda weight: Cell(weight).__call__,
        lambda weight: functools.partial(plain, weight),
        lambda weight: jax.tree_util.Partial(plain, weight),
        lambda weight: eqx.Partial(plain, weight),
        lambda weight: lambda h, x: plain(weight, h, x),
        lambda weight: eqx.filter_jit(Cell(weight)),
        lambda weight: el.Remat(Cell(weight)),
    ],
)
def test_f_is_differentiated_whatever_it_is(make):
    def loss(weight):
        carry, ys = el.CheckpointedScan(make(weight), base=2)(0.0, XS)
        return carry + jnp.sum(ys)

    slope = jax.jit(jax.grad(loss))(WEIGHT)
    np.testing.assert_allclose(slope, expected_slope(), rtol=1e-5)


def test_f_may_close_over_traced_arrays():
    @jax.jit
    def outer(weight, extra):
        @el.CheckpointedScan(base=2)
        def scan(h, x):
            return jnp.tanh(weight * h + x) + extra, extra

        carry, ys = scan(jnp.zeros(()), XS)
        return carry + jnp.sum(ys)

    def expected(weight, extra):
        f = lambda h, x: (jnp.tanh(weight * h + x) + extra, extra)
        carry, ys = jax.lax.scan(f, 0.0, XS)
        return carry + jnp.sum(ys)

    both = (jax.jit(jax.grad(f, (0, 1)))(WEIGHT, 0.1) for f in (outer, expected))
    np.testing.assert_allclose(*both, rtol=1e-5)


# How often f is called


def evaluations(scan: Any, length: int) -> int:
    count = 0

    def tick(_: Any) -> None:
        nonlocal count
        count += 1

    def f(carry, x):
        jax.debug.callback(tick, carry)
        return carry + x, x

    jax.block_until_ready(scan(f)(jnp.zeros(()), jnp.ones(length)))
    jax.effects_barrier()
    return count


@pytest.mark.parametrize("length", [0, 1, 2, 17, 100])
@pytest.mark.parametrize(
    "scan",
    [
        el.Scan,
        el.CheckpointedScan,
        el.Scan(unroll=3),
        el.CheckpointedScan(base=3, reverse=True),
        el.CheckpointedScan(schedule=el.Chunked(7)),
        el.CheckpointedScan(schedule=el.Binomial(5)),
    ],
    ids=str,
)
def test_the_primal_evaluates_f_exactly_length_times(scan, length):
    assert evaluations(scan, length) == length


def test_f_is_traced_once():
    count = 0

    def f(carry, x):
        nonlocal count
        count += 1
        return carry + x, x

    el.CheckpointedScan(f)(jnp.zeros(()), XS)
    assert count == 1
    el.CheckpointedScan(f)(0.0, XS)
    assert count == 3  # once more, as the number turned out to change
