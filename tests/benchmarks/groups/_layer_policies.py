"""What a budget has each layer keep, beside every policy that names allow."""

import itertools
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import memory, over_the_best
from .._comparison import Comparison
from .._measure import Case

DEPTH, WIDTH, HEADS, ROWS, LENGTH = 12, 128, 4, 4, 64
_NAMES = ("heads", "attention", "out", "hidden")
# Of the way from the least memory of these policies to the most.
_PARTS = (0.02, 0.1, 0.2, 0.4, 1.0)


class NamedBlock(eqx.Module):
    """A layer of a transformer, on a batch of sequences."""

    mixes: jax.Array
    out: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, *, key: jax.Array) -> None:
        sizes = ((1, 3), (1, 1), (1, 4), (4, 1))
        self.mixes, self.out, self.up, self.down = (
            jr.normal(k, (n * WIDTH, m * WIDTH)) / (n * WIDTH) ** 0.5
            for k, (n, m) in zip(jr.split(key, 4), sizes, strict=True)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = el.name(_normed(x) @ self.mixes, "heads")
        q, k, v = jnp.split(heads.reshape(*x.shape[:-1], HEADS, -1), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = el.name(jax.nn.softmax(scores), "attention")
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + el.name(mixed @ self.out, "out")
        hidden = el.name(_normed(x) @ self.up, "hidden")
        return x + jax.nn.gelu(hidden) @ self.down


def _normed(x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)


def policies_of_layers() -> Comparison:
    """Budgets with `policy="auto"`, and all that one would try by hand."""
    build = lambda key: NamedBlock(key=key)
    layers = el.StackedLayers.init(build, DEPTH, key=jr.key(0)).layers
    args = layers, jr.normal(jr.key(1), (ROWS, LENGTH, WIDTH))
    stack = lambda **how: el.StackedLayers(layers, **how)
    settings = dict(_by_hand())
    sizes = [stack(**how).plan(args[1]).peak_bytes for how in settings.values()]
    least, most = min(sizes), max(sizes)
    budgets = [round(least + part * (most - least)) for part in _PARTS]
    ours = {
        f"budget of {size / 1e6:.1f} MB": dict(schedule=el.Budget(size), policy="auto")
        for size in budgets
    }
    claims = []
    for name, size in zip(ours, budgets, strict=True):
        others = tuple(settings)
        claims += [memory(name, size), over_the_best(name, others, size, 1.05)]
    return Comparison(
        f"{DEPTH} transformer layers of width {WIDTH}, and what they keep",
        [
            Case(name, _gradient(how), args)
            for name, how in {**settings, **ours}.items()
        ],
        claims,
        tolerance=2e-3,
    )


def _by_hand() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every set of names, all dots, every residual, and every so many inputs."""
    yield "everything", {}
    yield "nothing", {"policy": el.policies.save_nothing}
    yield "dots", {"policy": el.policies.save_dots}
    for count in range(1, len(_NAMES) + 1):
        for names in itertools.combinations(_NAMES, count):
            yield ", ".join(names), {"policy": el.policies.save_names(*names)}
    for size in (1, 3, 4):
        yield f"Chunked({size})", {"schedule": el.Chunked(size)}


def _gradient(how: dict[str, Any]) -> Any:
    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(el.StackedLayers(layers, **how)(x) ** 2)

    return jax.grad(loss)
