"""One key for a map: split by row, whatever the chunks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

pytestmark = pytest.mark.sampled

X = jnp.arange(7.0)
KEY = jax.random.key(3)


def noisy(x, *, key):
    return x + jax.random.normal(key)


MAPS = {
    "Vmap": el.Vmap,
    "Map": el.Map,
    "Map, in batches": el.Map(batch_size=2),
    "ChunkedVmap": el.ChunkedVmap(chunk_size=3),
    "ChunkedVmap, one by one": el.ChunkedVmap(chunk_size=1),
    "ChunkedVmap, within a budget": el.ChunkedVmap(chunk_size=el.Budget("1KiB")),
}


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)], ids=["typed", "legacy"])
def test_each_row_has_a_key_of_its_own_whatever_the_chunks(key):
    run = lambda key: [transform(noisy)(X, key=key) for transform in MAPS.values()]
    keys = jax.random.split(key, 7)
    expected = jax.vmap(lambda x, key: noisy(x, key=key))(X, keys)
    assert len(set(expected.tolist())) == 7
    for found in jax.jit(run)(key):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("transform", [el.Vmap, el.ChunkedVmap(chunk_size=3)])
def test_keys_that_are_rows_stay_as_they_are(transform):
    keys = jax.random.split(KEY, 7)
    found = transform(noisy)(X, key=keys)
    np.testing.assert_array_equal(found, transform(noisy)(X, key=KEY))


@pytest.mark.parametrize(
    "transform",
    [
        el.Vmap(in_axes={"key": None}),
        el.ChunkedVmap(chunk_size=3, in_axes={"key": None}),
    ],
)
def test_one_key_for_all_rows_if_asked_for(transform):
    found = transform(noisy)(X, key=KEY)
    np.testing.assert_allclose(found - X, [jax.random.normal(KEY)] * 7, rtol=1e-5)


def test_an_argument_that_happens_to_be_called_key():
    by_name = el.ChunkedVmap(lambda x, key: (x, key), 3)
    assert by_name(X, key="static")[1] == "static"
    np.testing.assert_array_equal(by_name(X, key=X)[1], X)
    np.testing.assert_array_equal(el.Vmap(by_name.f)(X, None)[0], X)


def test_an_ensemble_from_one_key():
    make = lambda key: eqx.nn.Linear(2, 3, key=key)
    ensemble = el.Vmap(make, axis_size=5)(key=KEY)
    assert ensemble.weight.shape == (5, 3, 2)
    expected = eqx.filter_vmap(make)(jax.random.split(KEY, 5))
    np.testing.assert_array_equal(ensemble.weight, expected.weight)


def test_gradients_do_not_depend_on_the_chunks():
    def loss(transform):
        row = lambda w, x, key: w * noisy(x, key=key) ** 2
        return lambda w: transform(lambda x, key: row(w, x, key))(X, key=KEY).sum()

    run = lambda w: [jax.grad(loss(transform))(w) for transform in MAPS.values()]
    first, *others = jax.jit(run)(2.0)
    np.testing.assert_allclose(others, [first] * len(others), rtol=1e-5)
