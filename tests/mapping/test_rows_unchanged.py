"""Rows that a mapped function returns as they came are taken from its arguments."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from ..weights import normal

pytestmark = pytest.mark.sampled

XS = normal(0, (7, 4, 3))
FUNCTIONS: dict[str, Any] = {
    "itself": lambda x: x,
    "beside others": lambda x: (jnp.sin(x @ x.T), {"x": x, "row": x[0]}, x.T),
    "summed": lambda x: (x, x.sum()),
}
MAPS: dict[str, Any] = {
    "ChunkedVmap": lambda f, **axes: el.ChunkedVmap(f, 3, **axes),
    "with a policy": lambda f, **axes: el.ChunkedVmap(f, 2, policy="save_dots", **axes),
    "all at once": lambda f, **axes: el.ChunkedVmap(f, 9, **axes),
    "ParallelMap": lambda f, **axes: el.ParallelMap(f, chunk_size=1, **axes),
}


def weigh(tree: Any) -> jax.Array:
    return sum((jnp.sum(jnp.sin(x) * x) for x in jax.tree.leaves(tree)), jnp.zeros(()))


def everything(mapped: Any, xs: jax.Array) -> Any:
    derive = jax.value_and_grad(lambda xs: weigh(mapped(xs)))
    push = lambda xs: jax.jvp(mapped, (xs,), (jnp.cos(xs),))
    twice = lambda xs: jax.jvp(derive, (xs,), (jnp.cos(xs),))[1]
    return jax.jit(lambda xs: (mapped(xs), derive(xs), push(xs), twice(xs)))(xs)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", MAPS)
def test_is_vmap(kind, name):
    f = FUNCTIONS[name]
    expected = everything(jax.vmap(f), XS)
    assert_close(everything(MAPS[kind](f), XS), expected)


@pytest.mark.parametrize("name", ["itself", slow("beside others")])
def test_along_other_axes(name):
    f, axes = FUNCTIONS[name], dict(in_axes=2, out_axes=-1)
    mapped = MAPS["ChunkedVmap"](f, **axes)
    xs = jnp.moveaxis(XS, 0, 2)
    assert_close(everything(mapped, xs), everything(jax.vmap(f, **axes), xs))


def test_reductions_keep_their_rows():
    f = lambda x: {"sum": x, "rows": x, "mean": x[0], "other": x * 2}
    how = {"sum": "sum", "rows": None, "mean": "mean", "other": None}
    found = el.ChunkedVmap(f, 3, reduce=how)(XS)
    expected = {"sum": XS.sum(0), "rows": XS, "mean": XS[:, 0].mean(0), "other": XS * 2}
    assert_close(found, expected)


@pytest.mark.parametrize("kind", ["ChunkedVmap", slow("with a policy")])
def test_a_gradient_holds_no_copy_of_them(kind):
    xs = jnp.ones((64, 64, 32))

    def temp(f):
        mapped = MAPS[kind](f)
        return temp_bytes(jax.grad(lambda xs: weigh(mapped(xs))), xs)

    assert temp(FUNCTIONS["itself"]) == 0
    # What is beside it takes as much as it does alone.
    alone = temp(lambda x: x.sum())
    assert temp(FUNCTIONS["summed"]) < alone + 0.1 * xs.nbytes


def test_callbacks_run_even_if_nothing_is_computed():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return x

    jax.jit(el.ChunkedVmap(f, 2))(jnp.arange(4.0))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]
