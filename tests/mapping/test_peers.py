"""What the documentation of powerpax and brainstate says of their maps, done here."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

X = jnp.arange(12.0).reshape(6, 2)


# powerpax.chunked_vmap


@pytest.mark.parametrize("chunk_size", [1, 4, 6, 100])
def test_all_arguments_over_their_first_axes_positional_and_by_keyword(chunk_size):
    def f(tree, y, *, z):
        return {"sum": tree["x"] + y, "z": z}

    found = el.ChunkedVmap(f, chunk_size)({"x": X}, X[:, 0], z=X)
    np.testing.assert_array_equal(found["sum"], X + X[:, :1])
    np.testing.assert_array_equal(found["z"], X)


def test_an_argument_that_is_not_vectorised_by_partial_or_by_axes():
    f = lambda w, x: x @ w
    w = jnp.arange(4.0).reshape(2, 2)
    by_partial = el.ChunkedVmap(functools.partial(f, w), 4)(X)
    by_axes = el.ChunkedVmap(f, 4, in_axes=(None, 0))(w, X)
    np.testing.assert_array_equal(by_partial, X @ w)
    np.testing.assert_array_equal(by_axes, X @ w)


def test_a_chunk_size_that_is_an_integer_of_numpy():
    np.testing.assert_array_equal(el.ChunkedVmap(jnp.sin, np.int64(4))(X), jnp.sin(X))


def test_lengths_that_disagree_and_arguments_without_rows():
    with pytest.raises(ValueError, match="lengths must all be the same"):
        el.ChunkedVmap(jnp.add, 4)(X, X[:5])
    with pytest.raises(ValueError, match="has no axis"):
        el.ChunkedVmap(jnp.add, 4)(X, jnp.float32(1.0))
    with pytest.raises(ValueError, match="nothing to map over"):
        el.ChunkedVmap(lambda: 1, 4)()


# brainstate.transform.vmap, vmap_new_states, map and unvmap


def test_map_over_several_trees_one_by_one_and_in_batches():
    normalise = lambda row: row / (1.0 + jnp.linalg.norm(row))
    expected = X / (1.0 + jnp.linalg.norm(X, axis=1, keepdims=True))
    for batch_size in (None, 2, 4):  # of which 4 leaves a remainder
        found = el.Map(normalise, batch_size=batch_size)(X)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    both = el.Map(lambda x, tree: (x + tree["a"], tree["b"][0]))
    total, first = both(X, {"a": X, "b": (X,)})
    np.testing.assert_array_equal(total, 2 * X)
    np.testing.assert_array_equal(first, X)


def test_map_draws_other_numbers_for_each_row_in_batches_too():
    draw = lambda x, key: x + jax.random.uniform(key)
    one_by_one = el.Map(draw)(jnp.zeros(6), key=jax.random.key(0))
    in_batches = el.Map(draw, batch_size=4)(jnp.zeros(6), key=jax.random.key(0))
    assert len(set(one_by_one.tolist())) == 6
    np.testing.assert_array_equal(one_by_one, in_batches)


def test_vmap_along_other_axes_by_name_and_with_a_size():
    f = lambda x, y: x * y
    found = el.Vmap(f, in_axes={"x": 1, "y": None}, out_axes=1)(X, jnp.ones(6))
    np.testing.assert_array_equal(found, X)
    assert el.Vmap(lambda: jnp.zeros(3), axis_size=4)().shape == (4, 3)
    summed = el.Vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(X)
    np.testing.assert_array_equal(summed, jnp.stack([X.sum(0)] * 6))


def test_states_made_inside_of_a_vmap():
    class Counter(eqx.Module):
        count: jax.Array
        name: str = "counter"

        def advance(self, by):
            return Counter(self.count + by)

    counters = el.Vmap(lambda i: Counter(i * jnp.ones(2)))(jnp.arange(3.0))
    assert counters.count.shape == (3, 2)
    assert counters.name == "counter"
    advanced = el.Vmap(Counter.advance)(counters, jnp.arange(3.0))
    np.testing.assert_array_equal(advanced.count, 2 * counters.count)


def test_nested_vmap_of_pairs():
    outer = el.Vmap(el.Vmap(jnp.multiply, in_axes=(None, 0)), in_axes=(0, None))
    found = outer(X[:, 0], X[:, 1])
    np.testing.assert_array_equal(found, jnp.outer(X[:, 0], X[:, 1]))


def test_unvmap_takes_a_value_out_of_a_vmap():
    flags = jnp.array([[True, False], [True, True]])
    assert not el.unvmap(flags, op="all")
    assert el.unvmap(flags, op="any")
    assert el.unvmap(jnp.array([1, 5, 3]), op="max") == 5
    np.testing.assert_array_equal(el.unvmap(X, op="none"), X)
    shared = jax.vmap(lambda row: el.unvmap(row > 0, "any"))(X - 11)
    assert shared.tolist() == [False] * 6
