"""Edits of single layers of a stack, and what users do with it."""

import dataclasses
import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

import eqloop as el

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


def test_an_array_of_one_layer():
    layers = stack()
    bias = layers.layers.bias.at[3].set(X)
    found = eqx.tree_at(lambda layers: layers.layers.bias, layers, bias)
    expected = eqx.tree_at(lambda each: each[3].bias, layers.unstack(), X)
    assert eqx.tree_equal(found, el.StackedLayers.from_layers(expected))


def test_a_whole_layer():
    layers, new = stack(), block(9)
    put = lambda every, one: every.at[4].set(one) if eqx.is_array(one) else every
    found = jax.tree.map(put, layers.layers, new)
    expected = eqx.tree_at(lambda each: each[4], layers.unstack(), new)
    found = dataclasses.replace(layers, layers=found)
    assert eqx.tree_equal(found, el.StackedLayers.from_layers(expected))


def test_layers_whose_gradient_is_stopped():
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layers):
        first = jax.lax.stop_gradient(layers.layers.weight[:4])
        weight = layers.layers.weight.at[:4].set(first)
        where = lambda layers: layers.layers.weight
        return jnp.sum(eqx.tree_at(where, layers, weight)(X) ** 2)

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
