"""A deep model of equal layers: tracing and compiling it, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import compile_ratio
from .._comparison import Comparison
from .._measure import Case

DEPTHS = (3, 6, 12, 24)
WIDTH, HEADS, LENGTH = 64, 4, 32


class Block(eqx.Module):
    """A layer of a transformer, on a sequence of tokens."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, *, key: jax.Array) -> None:
        attention_key, mlp_key = jr.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp_key)
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, mask)
        return x + jax.vmap(lambda token: self.mlp(self.norms[1](token)))(x)


def stacked_layers() -> Sequence[Comparison]:
    """A stack of transformer layers, beside a Python loop over the same layers.

    Both are given a list of layers, so that the stacking is part of what is measured.
    """
    return [_of_depth(depth) for depth in DEPTHS]


def _of_depth(depth: int) -> Comparison:
    layers = [Block(key=key) for key in jr.split(jr.key(0), depth)]
    weights, static = eqx.partition(layers, eqx.is_array)
    args = (weights, jr.normal(jr.key(1), (LENGTH, WIDTH)))
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def gradient(run: Callable[..., Any]) -> Callable[..., Any]:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(run(eqx.combine(weights, static), x, mask) ** 2)

        return jax.grad(loss)

    plain, ours = "Python loop", "StackedLayers"
    deepest = depth == max(DEPTHS)
    return Comparison(
        f"Gradient of the weights: {depth} transformer layers, width {WIDTH}",
        [
            Case(plain, gradient(_in_turn), args, line=plain),
            Case(ours, gradient(_stacked), args, line=ours),
        ],
        [compile_ratio(ours, plain, 0.25)] if deepest else [],
        compile_rounds=3 if deepest else 1,
        size=depth,
    )


def _in_turn(layers: Sequence[Block], x: jax.Array, mask: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x, mask)
    return x


def _stacked(layers: Sequence[Block], x: jax.Array, mask: jax.Array) -> jax.Array:
    return el.StackedLayers.from_layers(layers)(x, mask)
