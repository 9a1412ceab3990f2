"""Python numbers that a mapped function returns, and what is given an axis of them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_same
from ..marks import slow

pytestmark = pytest.mark.sampled

X = jnp.arange(5.0)
mark = jax.lax.stop_gradient


def row(number, x):
    return {"y": x * 2, "number": number, "label": "static", "pair": (True, [number])}


MAPS = {
    "Vmap": el.Vmap,
    "ChunkedVmap": functools.partial(el.ChunkedVmap, chunk_size=2),
    "one chunk": functools.partial(el.ChunkedVmap, chunk_size=8),
    "ParallelMap": el.ParallelMap,
    "chunks on devices": functools.partial(el.ParallelMap, chunk_size=1),
}

AXES = {
    "all": 0,
    "the last": -1,
    "a function": lambda leaf: None if isinstance(leaf, str) else 0,
    "some": {"y": 0, "number": None, "label": None, "pair": (0, None)},
    "others": {"y": 0, "number": 0, "label": 0, "pair": (None, [0])},
    "by default": eqx.if_array(0),
    "arrays alone": {"y": 0, "number": eqx.if_array(0), "label": None, "pair": None},
}


def by_equinox(f, axes, x):
    """`equinox.filter_vmap`, which takes no axis for what is no array or number."""
    without = lambda x: f(x) | {"label": None}
    return eqx.filter_vmap(without, out_axes=axes)(x) | {"label": "static"}


@pytest.mark.parametrize("number", [2.5, 3, slow(1j), slow(True)])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.usefixtures("either_width")
def test_are_stacked_where_they_have_an_axis(name, number):
    f = functools.partial(row, number)
    for axes in AXES.values():
        found = MAPS[name](f, out_axes=axes)(X)
        assert_same(found, by_equinox(f, axes, X))
    marked = functools.partial(row, mark(number))
    assert_same(MAPS[name](marked, out_axes=0)(X), by_equinox(f, 0, X))


def test_under_jit_grad_and_vmap():
    def loss(mapped, x):
        out = mapped(x)
        return jnp.sum(out["y"] * out["number"]) + out["pair"][1][0].sum()

    f = functools.partial(row, 2.5)
    ours = el.ChunkedVmap(f, 2, out_axes=0)
    theirs = lambda x: by_equinox(f, 0, x)
    derive = lambda mapped: jax.vmap(jax.grad(functools.partial(loss, mapped)))
    xs = jnp.stack([X, -X])
    np.testing.assert_allclose(*(jax.jit(derive(m))(xs) for m in (ours, theirs)))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_map_stacks_them_as_that_of_jax(rows):
    f = lambda x: (x, 2.5, (True, [3]))
    for settings in ({}, {"batch_size": 2}):
        found = el.Map(f, **settings)(X[:rows])
        assert_same(found, jax.lax.map(f, X[:rows]))
        assert el.Map(lambda x: (x, "static"), **settings)(X)[1] == "static"


def test_reductions_keep_their_places():
    f = lambda x: {"a": 2.0, "b": x, "c": 3, "d": x + 1}
    how = {"a": None, "b": "sum", "c": "mean", "d": None}
    found = el.ChunkedVmap(f, 2, out_axes=0, reduce=how)(X)
    assert_same(
        {k: found[k] for k in "abd"},
        {"a": jax.vmap(lambda _: 2.0)(X), "b": X.sum(), "d": X + 1},
    )
    assert found["c"] == 3


def test_an_axis_that_a_number_does_not_have():
    with pytest.raises(ValueError, match=r"gives axis 1 for out\[1\]"):
        el.Vmap(lambda x: (x, 2.0), out_axes=(0, 1))(X)
