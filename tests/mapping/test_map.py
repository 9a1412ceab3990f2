"""`Map` against `jax.lax.map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from .rows import derivatives

X = jnp.sin(jnp.arange(21.0)).reshape(7, 3)


def row(x):
    y = lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    return {"y": y, "steps": lax.while_loop(lambda i: i < x[1], lambda i: i + 1, 0)}


@pytest.mark.parametrize(
    ("rows", "either_width"),
    [(0, False), (1, False), (7, True), *(slow(n, n < 7) for n in (0, 1, 7))],
    indirect=["either_width"],
)
@pytest.mark.usefixtures("either_width")
def test_is_lax_map_with_its_derivatives(rows):
    settings = ({}, {"unroll": 3}, {"batch_size": 3}, {"batch_size": 3, "unroll": 2})
    f = lambda x: {"y": row(x)["y"]}
    maps = [lambda x: lax.map(f, x), *(el.Map(f, **each) for each in settings)]
    run = lambda x: [derivatives(g, x) for g in maps]
    expected, *found = jax.jit(run)(X[:rows])
    for derivative in found:
        assert_close(derivative, expected)
    assert_close(el.Map(row)(X[:rows]), lax.map(row, X[:rows]))


@pytest.mark.parametrize("f", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())])
def test_a_branch_that_is_not_taken_is_not_run(f):
    mapped = lambda transform: f(transform(lambda x: row(x)["y"]))
    text = jax.jit(mapped(el.Map)).lower(X).as_text()
    assert "stablehlo.case" in text
    vmapped = jax.jit(mapped(el.Vmap)).lower(X).as_text()
    assert "stablehlo.case" not in vmapped


def test_several_arguments_by_name_and_what_is_no_array():
    def f(x, tree, *, scale):
        return scale * x + tree["a"], tree["label"]

    trees = {"a": jnp.arange(7.0)[:, None], "label": "static"}
    found, label = el.Map(f)(X, trees, scale=jnp.arange(7.0))
    assert_close(found, jnp.arange(7.0)[:, None] * (X + 1))
    assert label == "static"


def test_rows_are_run_in_order_and_once():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(int(x)), x, ordered=True)
        return x

    found = jax.jit(lambda: el.Map(f)(jnp.arange(5)))()
    jax.effects_barrier()
    assert seen == found.tolist() == list(range(5))


def test_memory_of_the_gradient_is_that_of_one_row():
    def temporary(transform, rows):
        wide = lambda x: jnp.sum(jnp.sin(jnp.outer(x, jnp.sin(x))))
        total = lambda x: jnp.sum(transform(wide)(x))
        return temp_bytes(jax.grad(total), (rows, 32))

    few, many = temporary(el.Map, 10), temporary(el.Map, 1000)
    assert many <= few + 3 * 4 * 1000  # the cotangents of as many results
    by_lax = temporary(lambda f: lambda x: lax.map(f, x), 1000)
    assert many < by_lax / 20


def test_is_a_decorator():
    @el.Map(batch_size=2)
    def double(x):
        return 2 * x

    np.testing.assert_array_equal(double(X), 2 * X)
    assert repr(el.Map(jnp.sin)).startswith("Map(")
