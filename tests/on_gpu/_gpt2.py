"""GPT-2 small, as one writes it in plain JAX: the loss of a batch of texts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from ..fits._functions import Division, Function


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those of the model and of a batch."""

    layers: int
    heads: int
    per_head: int
    words: int
    length: int
    batch: int

    @property
    def width(self) -> int:
        return self.heads * self.per_head


def sizes(of: Callable[[int], int]) -> Sizes:
    """The model as it was published, or with other numbers in place of these."""
    return Sizes(of(12), of(12), of(64), of(50_304), of(1024), of(8))


def inputs(n: Sizes) -> tuple[Any, jax.Array]:
    """Weights in float32, and tokens."""
    keys = iter(jr.split(jr.key(0), 7))
    weight = lambda *shape: 0.02 * jr.normal(next(keys), shape)
    of_layers = {
        "qkv": weight(n.layers, n.width, 3 * n.width),
        "out": weight(n.layers, n.width, n.width),
        "up": weight(n.layers, n.width, 4 * n.width),
        "down": weight(n.layers, 4 * n.width, n.width),
    }
    p = {"words": weight(n.words, n.width), "places": weight(n.length, n.width)}
    tokens = jr.randint(next(keys), (n.batch, n.length), 0, n.words)
    return {**p, "layers": of_layers}, tokens


def gpt2(n: Sizes, tokens_of_head: int | None = None) -> Function:
    """The model, which computes in bfloat16.

    Args:
        n: Its sizes.
        tokens_of_head: How many tokens its head takes at a time, if it is divided by
            hand.
    """

    def entropy(words: jax.Array, x: jax.Array, next_one: jax.Array) -> jax.Array:
        logits = (_norm(x) @ words.astype(x.dtype).T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, next_one[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def block(q: Any, x: jax.Array) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:-1], n.heads, n.per_head)
        q = jax.tree.map(lambda w: w.astype(x.dtype), q)
        queries, k, v = map(split, jnp.split(_norm(x) @ q["qkv"], 3, axis=-1))
        scores = jnp.einsum("btnd,bsnd->bnts", queries, k) / n.per_head**0.5
        seen = jnp.tril(jnp.ones((n.length, n.length), bool))
        mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        x = x + jnp.einsum("bnts,bsnd->btnd", mixed, v).reshape(x.shape) @ q["out"]
        return x + jax.nn.gelu(_norm(x) @ q["up"]) @ q["down"]

    def loss(around: Division, p: Any, tokens: jax.Array) -> jax.Array:
        layer = around(block)
        x = (p["words"][tokens] + p["places"]).astype(jnp.bfloat16)
        x, _ = jax.lax.scan(lambda x, q: (layer(q, x), None), x, p["layers"])
        next_ones = jnp.roll(tokens, -1, axis=1)
        if tokens_of_head is None:
            return entropy(p["words"], x, next_ones)
        axes = dict(in_axes=(None, 0, 0), reduce="mean")
        head = el.ChunkedVmap(entropy, tokens_of_head, **axes)
        return head(p["words"], x.reshape(-1, n.width), next_ones.reshape(-1))

    return Function("GPT-2 small", loss, (), 1)


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, -1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)
