"""`Vmap` against `equinox.filter_vmap`; `ChunkedVmap` is tested beside both."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..weights import without_key
from .rows import MATRIX, ROWS, layer

KEYS = jax.random.split(jax.random.key(0), 3)


def make(key):
    return eqx.nn.MLP(3, 2, 4, depth=1, key=key)


def test_modules_made_inside_are_an_ensemble():
    evaluate = lambda model, x: model(x)

    @eqx.filter_jit
    def run(vmap):
        ensemble = vmap(make)(KEYS)
        shared = vmap(evaluate, in_axes={"x": None})(ensemble, ROWS[0])
        return ensemble, shared, vmap(evaluate)(ensemble, ROWS[:3])

    def theirs(f, in_axes=None):
        axes = (eqx.if_array(0), None) if in_axes else eqx.if_array(0)
        return eqx.filter_vmap(f, in_axes=axes)

    found = run(el.Vmap)
    assert_close(found, run(theirs))
    assert found[0].activation is jax.nn.relu


def test_collectives_along_the_axis():
    @el.Vmap(axis_name="rows")
    def centred(x):
        return x - jax.lax.pmean(x, "rows"), jax.lax.axis_index("rows")

    found, index = centred(ROWS)
    np.testing.assert_allclose(found, ROWS - ROWS.mean(0, keepdims=True), atol=1e-6)
    assert index.tolist() == list(range(7))
    gradient = jax.grad(lambda x: jnp.sum(centred(x)[0] ** 3))(ROWS)
    expected = jax.grad(lambda x: jnp.sum((x - x.mean(0, keepdims=True)) ** 3))(ROWS)
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_a_collective_of_all_rows_is_the_same_for_each():
    both = el.Vmap(
        lambda x: (x, jax.lax.psum(x, "i")), axis_name="i", out_axes=(0, None)
    )
    assert_close(both(ROWS), (ROWS, ROWS.sum(0)))


def test_a_size_where_nothing_is_mapped():
    run = el.Vmap(
        lambda x: x + jax.lax.axis_index("i").astype(float),
        axis_size=3,
        axis_name="i",
        in_axes=None,
    )
    assert run(jnp.float32(1.0)).tolist() == [1.0, 2.0, 3.0]
    assert el.Vmap(lambda: jnp.ones(2), axis_size=0)().shape == (0, 2)
    assert el.Vmap(jnp.sin, axis_size=7)(ROWS).shape == (7, 3)


def test_what_is_not_mapped_is_concrete_outside_of_jit():
    def power(x, n):
        return x if n > 3 else x**2  # Python's `if`, on an array

    run = el.Vmap(power, in_axes={"n": None})
    assert_close(run(ROWS, jnp.array(4)), ROWS)
    assert_close(run(ROWS, jnp.array(2)), ROWS**2)


def test_is_a_module_a_decorator_and_a_method():
    class Model(eqx.Module):
        matrix: jax.Array

        @el.Vmap(in_axes={"bias": None}, out_axes=1)
        def __call__(self, x, bias):
            return layer(self.matrix, x) + bias

    expected = jax.vmap(lambda x: layer(MATRIX, x) + 1, out_axes=1)(ROWS)
    assert_close(Model(MATRIX)(ROWS, 1.0), expected)
    vmapped = el.Vmap(without_key(eqx.nn.Linear, 3, 2))
    assert len(jax.tree.leaves(vmapped)) == 2
    assert inspect.signature(el.Vmap(layer)) == inspect.signature(layer)


def test_nested():
    outer = el.Vmap(el.Vmap(jnp.dot, in_axes=(None, 0)), in_axes=(0, None))
    assert_close(outer(ROWS, ROWS), ROWS @ ROWS.T)


@pytest.mark.parametrize("out_axes", [0, 1, -1])
def test_jaxtyping_annotations_hold(out_axes):
    from jaxtyping import Array, Float

    def f(x: Float[Array, "n"], y: Float[Array, "n"]) -> Float[Array, "n"]:
        return x + y

    assert el.Vmap(f, out_axes=out_axes)(ROWS, ROWS).size == ROWS.size
    with pytest.raises(TypeError, match="n"):
        el.Vmap(f)(ROWS, ROWS[:, :2])
