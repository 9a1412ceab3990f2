"""A small transformer, some values of which have names."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqloop as el

from ...weights import normal

LENGTH, WIDTH, HEADS = 8, 16, 2


class TransformerBlock(eqx.Module):
    """Attention and a multilayer perceptron, each added to what comes in."""

    mixes: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        drawn = lambda i, *s: jax.random.normal(keys[i], s) / s[0] ** 0.5
        self.mixes = drawn(0, WIDTH, 3 * WIDTH)
        self.out = drawn(1, WIDTH, WIDTH)
        self.up = drawn(2, WIDTH, 4 * WIDTH)
        self.down = drawn(3, 4 * WIDTH, WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = jnp.reshape(_normed(x) @ self.mixes, (*x.shape[:-1], HEADS, -1))
        q, k, v = jnp.split(heads, 3, -1)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k)
        weights = el.name(jax.nn.softmax(scores), "attention")
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        x = x + mixed.reshape(x.shape) @ self.out
        hidden = el.name(_normed(x) @ self.up, "up")
        return x + jax.nn.gelu(hidden) @ self.down


def _normed(x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def stacked(depth: int, **settings: Any) -> tuple[Any, jax.Array]:
    """A stack of such layers, and what it can be called with."""
    build = lambda key: TransformerBlock(key=key)
    layers = el.StackedLayers.init(build, depth, key=jax.random.key(0), **settings)
    return layers, normal(1, (2, LENGTH, WIDTH))
