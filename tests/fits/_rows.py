"""Losses with a dimension that goes through them, and what one writes by hand."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from ..benchmarks._measure import temp_bytes
from ._functions import Function
from ._measure import compiled, forget, seconds_of

# How many rows at a time there are by hand, and the budgets, of the plain gradient.
_BY_HAND, _SHARES = (1, 4, 16), (0.5, 0.25, 0.1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A loss that is a mean over rows.

    Attributes:
        of: The loss of weights and of some rows.
        weights: The weights, by which it is differentiated.
        rows: Arrays whose first axis is that of the rows.
    """

    name: str
    of: Callable[..., jax.Array]
    weights: Any
    rows: tuple[jax.Array, ...]

    def some_at_a_time(self, size: int) -> Callable[..., jax.Array]:
        """The loss by a scan over chunks, each run again on the way back."""

        def loss(weights: Any, *rows: jax.Array) -> jax.Array:
            cut = lambda x: x.reshape(-1, size, *x.shape[1:])
            add = lambda total, chunk: (total + self.of(weights, *chunk), None)
            chunks = tuple(map(cut, rows))
            total, _ = jax.lax.scan(jax.checkpoint(add), 0.0, chunks)
            return total * size / len(rows[0])

        return loss


class _Block(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        a, b = jr.split(key)
        self.norms = [eqx.nn.LayerNorm(64), eqx.nn.LayerNorm(64)]
        self.attention = eqx.nn.MultiheadAttention(4, 64, dropout_p=0.1, key=a)
        self.mlp = eqx.nn.MLP(64, 64, 256, 1, jax.nn.gelu, key=b)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y, key=key)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


def vit() -> Rows:
    """A vision transformer with dropout."""
    first, *keys = jr.split(jr.key(0), 5)
    patch = eqx.nn.Conv2d(3, 64, 4, 4, key=first)
    dynamic, static = eqx.partition((patch, list(map(_Block, keys))), eqx.is_array)

    def of(weights: Any, images: jax.Array, labels: jax.Array, keys: jax.Array) -> Any:
        patch, blocks = eqx.combine(weights, static)

        def one(image: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
            x = patch(image).reshape(64, -1).T
            for block, own in zip(blocks, jr.split(key, len(blocks)), strict=True):
                x = block(x, own)
            return -jax.nn.log_softmax(x.mean(0))[label]

        return jnp.mean(jax.vmap(one)(images, labels, keys))

    images = jr.normal(jr.key(1), (32, 3, 32, 32))
    return Rows(
        "ViT, 32 images", of, dynamic, (images, jnp.arange(32), jr.split(first, 32))
    )


def u_net() -> Rows:
    """Convolutions there and back, with what is kept in between."""
    sizes = [(1, 8), (8, 16), (16, 8), (16, 8)]
    convs = [
        eqx.nn.Conv2d(*pair, 3, padding=1, key=key)
        for pair, key in zip(sizes, jr.split(jr.key(0), len(sizes)), strict=True)
    ]
    dynamic, static = eqx.partition(convs, eqx.is_array)
    pool = eqx.nn.AvgPool2d(2, 2)

    def of(weights: Any, images: jax.Array, noise: jax.Array) -> jax.Array:
        down, lower, up, last = eqx.combine(weights, static)

        def one(x: jax.Array) -> jax.Array:
            kept = jax.nn.silu(down(x))
            x = jax.nn.silu(up(jax.nn.silu(lower(pool(kept)))))
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            return jnp.mean(last(jnp.concatenate([x, kept])), 0, keepdims=True)

        return jnp.mean((jax.vmap(one)(images + noise) - noise) ** 2)

    images, noise = jr.normal(jr.key(1), (2, 16, 1, 64, 64))
    return Rows("U-Net, 16 images", of, dynamic, (images, noise))


def state_space() -> Rows:
    """Layers of associative scans."""
    weights = jr.normal(jr.key(0), (3, 48, 48)) / 7

    def of(weights: jax.Array, sequences: jax.Array) -> jax.Array:
        def join(x: Any, y: Any) -> Any:
            return x[0] * y[0], y[0] * x[1] + y[1]

        def one(x: jax.Array) -> jax.Array:
            for w in weights:
                gate = jax.nn.sigmoid(x @ w)
                _, h = jax.lax.associative_scan(join, (gate, jnp.tanh(x @ w.T)))
                x = x + h * jax.nn.silu(x)
            return x

        return jnp.mean(jax.vmap(one)(sequences) ** 2)

    sequences = jr.normal(jr.key(1), (16, 256, 48))
    return Rows("state space model, 16 sequences", of, weights, (sequences,))


def rows_of_losses() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What each loss takes as it is, by hand and by budgets."""
    for rows in (vit(), u_net(), state_space()):
        args = (rows.weights, *rows.rows)
        function = Function(
            rows.name, lambda _, *args, of=rows.of: of(*args), args, 1, ()
        )
        losses = {"plain": rows.of}
        losses |= {f"by hand, {n}": rows.some_at_a_time(n) for n in _BY_HAND}
        forget()
        found = {name: compiled(function, loss) for name, loss in losses.items()}
        whole = temp_bytes(found["plain"].run)
        for share in _SHARES:
            forget()
            fit = el.Fit(rows.of, int(share * whole))
            found[f"Fit, {share}"] = compiled(function, fit)
        times = seconds_of(function, [one.run for one in found.values()], 5)
        yield (
            rows.name,
            [
                {
                    "name": name,
                    "memory": temp_bytes(one.run) / whole,
                    "time": time / times[0],
                    "planning": one.seconds / found["plain"].seconds,
                    "programs": one.programs,
                }
                for (name, one), time in zip(found.items(), times, strict=True)
            ],
        )
