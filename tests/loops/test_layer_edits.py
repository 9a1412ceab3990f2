"""`equinox.tree_at` on single layers of a stack, and what users do with it."""

import dataclasses
import gc
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer

import eqloop as el
from eqloop.loops import _layer_edits as edits

from ..asserts import assert_close
from ..weights import normal

DEPTH, WIDTH = 6, 3
X = jnp.linspace(-1.0, 1.0, WIDTH)


class Block(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    key: jax.Array
    activation: object = jnp.tanh

    def __call__(self, x):
        return x + self.activation(self.weight @ x + self.bias)  # pyright: ignore


def block(seed):
    weight, bias = normal(seed, (WIDTH, WIDTH)), normal(seed + 1, (WIDTH,))
    return Block(weight, bias, jax.random.key(seed))


def stack(**settings):
    blocks = [block(seed) for seed in range(DEPTH)]
    return el.StackedLayers.from_layers(blocks, **settings)


def edited(layers, where, new):
    """The same edit, of a list of layers."""
    layers = eqx.tree_at(where, layers.unstack(), new)
    return el.StackedLayers.from_layers(layers)


def leaf(layers):
    return layers[3].bias


def two_leaves(layers):
    return layers[3].bias, layers[-1].weight


def two_of_one(layers):
    return layers[2].bias, layers[2].weight


def every_leaf(layers):
    return [layer.bias for layer in layers]


def a_layer(layers):
    return layers[4]


def a_key(layers):
    return layers[0].key


@pytest.mark.parametrize(
    ("where", "new"),
    [
        (leaf, X),
        (two_leaves, (X, jnp.eye(WIDTH))),
        (two_of_one, (X, jnp.eye(WIDTH))),
        (every_leaf, [i * X for i in range(DEPTH)]),
        (a_layer, block(9)),
        (a_key, jax.random.key(9)),
    ],
)
def test_as_of_a_list(where, new):
    layers, expected = stack(), edited(stack(), where, new)
    found = eqx.tree_at(where, layers, new)
    assert jax.tree.structure(found) == jax.tree.structure(layers)
    assert eqx.tree_equal(found, expected)
    assert eqx.tree_equal(layers, stack())

    under_jit = eqx.filter_jit(lambda stack, new: eqx.tree_at(where, stack, new))
    assert eqx.tree_equal(under_jit(layers, new), expected)


@pytest.mark.parametrize("part", [slice(4, None), slice(None, None, -2), slice(2, 2)])
def test_slices(part):
    layers = stack(policy=el.policies.save_dots)
    where = lambda layers: layers[part].layers.weight
    found = eqx.tree_at(where, layers, replace_fn=jnp.zeros_like)
    expected = np.array(layers.layers.weight)
    expected[part] = 0
    assert_close(found.layers.weight, expected)
    assert_close(found.layers.bias, layers.layers.bias)

    # A slice of another stack; the settings stay.
    other = dataclasses.replace(found, schedule=el.Chunked(2))[part]
    whole = eqx.tree_at(lambda layers: layers[part], layers, other)
    assert eqx.tree_equal(whole, found)


def test_parts_of_parts_and_all_layers_at_once():
    layers = stack()
    where = lambda layers: (layers[2:][1].bias, layers.layers.weight, layers[1:][0].key)
    new = X, 2 * layers.layers.weight, jax.random.key(9)
    found = eqx.tree_at(where, layers, new)
    assert_close(found.layers.bias, layers.layers.bias.at[3].set(X))
    assert_close(found.layers.weight, 2 * layers.layers.weight)
    assert found[1].key == jax.random.key(9)


def test_stacks_in_a_model_and_in_a_stack():
    model = {"name": "deep", "stacks": [stack(), stack()]}
    where = lambda model: model["stacks"][1][3].bias
    found = eqx.tree_at(where, model, X)
    assert eqx.tree_equal(found["stacks"][0], stack())
    assert eqx.tree_equal(found["stacks"][1], eqx.tree_at(leaf, stack(), X))

    nested = el.StackedLayers.from_layers([stack(), stack()])
    found = eqx.tree_at(lambda nested: nested[1][3].bias, nested, X)
    assert eqx.tree_equal(found[0], stack())
    assert eqx.tree_equal(found[1], eqx.tree_at(leaf, stack(), X))


def test_a_number_for_an_array_of_one():
    scale = jax.tree_util.Partial(lambda a, x: a * x, jnp.array([2, 3], jnp.bfloat16))
    layers = el.StackedLayers(scale)
    found = eqx.tree_at(lambda layers: layers[0].args, layers, (5.0,))
    assert found.layers.args[0].dtype == jnp.bfloat16
    assert_close(found.layers.args[0], jnp.array([5, 3], jnp.bfloat16))


def test_the_derivative_of_an_edit():
    def loss(layers, bias):
        return jnp.sum(eqx.tree_at(leaf, layers, bias)(X) ** 2)

    def written_out(layers, bias):
        x = X
        for i, layer in enumerate(layers):
            x = layer(x) if i != 3 else dataclasses.replace(layer, bias=bias)(x)
        return jnp.sum(x**2)

    by = eqx.filter_jit(lambda f: eqx.filter_grad(lambda args: f(*args))((stack(), X)))
    assert_close(by(loss), by(written_out))


def test_layers_whose_gradient_is_stopped():
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layers):
        where = lambda layers: layers[:4].layers.weight
        layers = eqx.tree_at(where, layers, replace_fn=jax.lax.stop_gradient)
        return jnp.sum(layers(X) ** 2)

    every = np.array(
        eqx.filter_grad(lambda f: jnp.sum(f(X) ** 2))(stack()).layers.weight
    )
    every[:4] = 0
    assert_close(gradient(stack()).layers.weight, every)


def test_stacks_of_several_depths_have_one_structure():
    layers = stack()
    joined = lambda a, b: jnp.concatenate([a, b]) if eqx.is_array(a) else a
    both = jax.tree.map(joined, layers[:2], layers[2:])
    assert eqx.tree_equal(both, layers)
    assert len(jax.tree.map(lambda _: False, layers)) == DEPTH
    assert len(eqx.filter(layers, eqx.is_inexact_array, inverse=True)) == DEPTH


def test_types_of_layers():
    layers = jax.eval_shape(lambda: eqx.filter(stack(), eqx.is_array))
    assert (len(layers), layers[0].bias.shape, len(layers[1:])) == (6, (3,), 5)
    assert layers[1:].layers.weight.shape == (5, WIDTH, WIDTH)


def test_nothing_is_remembered():
    gc.collect()
    before = len(edits._by_place), len(edits._by_result)
    layers = stack()
    held = layers[3]
    eqx.tree_at(two_leaves, layers, (X, jnp.eye(WIDTH)))
    assert held.bias is layers[3].bias
    del held

    @eqx.filter_jit
    def under_jit(layers):
        edited = eqx.tree_at(two_leaves, layers, replace_fn=lambda x: 2 * x)
        return edited(X) + edited[1].bias

    with jax.checking_leaks():
        under_jit(layers)
    gc.collect()
    assert (len(edits._by_place), len(edits._by_result)) == before


def test_a_slice_of_one_trace_is_not_used_in_another():
    layers, kept = stack(), []

    def f(x):
        kept.append(layers[3])  # nobody should do this
        return x + kept[-1].bias

    jax.jit(f)(X)
    assert not isinstance(layers[3].bias, Tracer)
    assert_close(jax.jit(lambda x: x + layers[3].bias)(X), X + layers[3].bias)


# A training, in the middle of which something is changed


@eqx.filter_jit
def train(layers, state, optimiser):
    grads = eqx.filter_grad(lambda layers: jnp.mean((layers(X) - 1) ** 2))(layers)
    params = eqx.filter(layers, eqx.is_inexact_array)
    updates, state = optimiser.update(grads, state, params)
    return eqx.apply_updates(layers, updates), state


def test_another_schedule_in_the_middle_of_a_training():
    optimiser = optax.adam(1e-2)  # it needs the usual promotion of dtypes
    params = lambda layers: eqx.filter(layers, eqx.is_inexact_array)

    def trained(change):
        layers = stack()
        state = optimiser.init(params(layers))
        layers, state = train(layers, state, optimiser)
        if change:
            layers = dataclasses.replace(layers, schedule=el.Chunked(2))
            like = jax.tree.structure(optimiser.init(params(layers)))
            state = jax.tree.unflatten(like, jax.tree.leaves(state))
        for _ in range(2):
            layers, state = train(layers, state, optimiser)
        return layers

    with jax.numpy_dtype_promotion("standard"):
        changed, unchanged = trained(True), trained(False)
    assert changed.schedule == el.Chunked(2)
    assert_close(params(changed).layers, params(unchanged).layers)


def test_what_was_saved_is_loaded_with_another_schedule():
    file = io.BytesIO()
    layers = eqx.tree_at(lambda layers: layers.layers.key, stack(), None)
    eqx.tree_serialise_leaves(file, layers)
    file.seek(0)
    other = dataclasses.replace(layers, schedule=el.Recursive(2), unroll=2)
    like = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, other)
    found = eqx.tree_deserialise_leaves(file, like)
    assert found.schedule == el.Recursive(2)
    assert eqx.tree_equal(found.layers, layers.layers)
