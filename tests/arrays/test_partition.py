"""Dynamic and static leaves: telling them apart, splitting and joining trees."""

import enum
import functools
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eqloop._arrays._partition import (
    as_arrays,
    describe,
    flatten,
    is_dynamic,
    is_scalar,
    partition,
    paths,
    same_static,
)


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.zeros(3),
        jax.random.key(0),
        np.zeros(3),
        np.float32(1),
        np.bool_(True),
    ],
)
def test_arrays_are_dynamic(leaf):
    assert is_dynamic(leaf)
    assert not is_scalar(leaf)


def test_tracers_are_dynamic():
    seen = []
    jax.eval_shape(lambda x: seen.append(is_dynamic(x)), jnp.zeros(3))
    assert seen == [True]


@pytest.mark.parametrize("leaf", ["relu", None, jnp.tanh, Level.LOW, object(), int])
def test_other_leaves_are_static(leaf):
    assert not is_dynamic(leaf)
    assert not is_scalar(leaf)


@pytest.mark.parametrize("leaf", [True, 1, 1.0, 1j])
def test_python_numbers_are_neither(leaf):
    assert not is_dynamic(leaf)
    assert is_scalar(leaf)


def test_as_arrays():
    tree = {"numpy": np.ones(2), "scalar": 1.0, "static": "relu"}
    converted = as_arrays(tree)
    assert isinstance(converted["numpy"], jax.Array)
    assert converted["scalar"] == 1.0
    assert isinstance(converted["scalar"], float)
    scalars = as_arrays(tree, scalars=True)
    assert scalars["scalar"].weak_type
    assert scalars["static"] == "relu"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        ("a", "a", True),
        (None, None, True),
        (jnp.tanh, jnp.tanh, True),
        (jnp.tanh, jnp.sin, False),
        (Level.LOW, 1, False),
        (functools.partial(max), functools.partial(max), False),
    ],
)
def test_same_static(before, after, same):
    assert same_static(before, after) is same


def test_same_static_where_equality_has_no_truth_value():
    class Odd:
        def __eq__(self, other):
            return np.array([True, False])

        __hash__ = object.__hash__

    odd = Odd()
    assert same_static(odd, odd)
    assert not same_static(odd, Odd())


def test_paths_read_as_one_would_write_them():
    tree = {"h": [1, Point(2, None)], "m": eqx.Partial(max, 3)}
    assert paths(tree, "carry") == [
        "carry['h'][0]",
        "carry['h'][1].x",
        "carry['h'][1].y",
        "carry['m'].func",
        "carry['m'].args[0]",
    ]
    assert paths(1, "carry") == ["carry"]


trees = st.recursive(
    st.integers() | st.none() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.builds(Point, inner, inner),
    max_leaves=8,
)


@hypothesis.given(trees, st.data())
def test_partition_and_join(tree, data):
    leaves, _ = flatten(tree)
    take = [data.draw(st.booleans()) for _ in leaves]
    taken, rest = partition(tree, take)
    assert taken == [leaf for leaf, t in zip(leaves, take, strict=True) if t]
    assert rest.join(taken) == tree
    marked, _ = flatten(rest.join([f"new {leaf}" for leaf in taken]))
    assert marked == [f"new {x}" if t else x for x, t in zip(leaves, take, strict=True)]


def test_partition_does_not_keep_what_was_taken():
    _, rest = partition([jnp.zeros(3), "static"], [True, False])
    assert rest.leaves == (None, "static")


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (jnp.zeros((2, 3)), "float32[2,3]"),
        (np.zeros((), np.int16), "int16[]"),
        (jax.random.key(0), "key<fry>[]"),
        (jax.ShapeDtypeStruct((4,), jnp.bfloat16), "bfloat16[4]"),
        ("relu", "'relu'"),
        (3, "3"),
    ],
)
def test_describe(leaf, text):
    assert describe(leaf) == text


def test_describe_is_short():
    assert len(describe("x" * 1000)) == 60
