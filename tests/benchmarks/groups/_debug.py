"""What it costs to look out for numbers that are not finite."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import time_ratio
from .._comparison import Comparison
from .._measure import Case

LENGTH, BATCH, WIDTH = 64, 64, 128


def debug() -> Sequence[Comparison]:
    """A recurrent network whose step takes some 100 µs, with and without."""
    cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=jr.key(0))
    weights, static = eqx.partition(cell, eqx.is_array)
    args = (weights, jr.normal(jr.key(1), (LENGTH, BATCH, WIDTH)))

    def loss(weights: Any, xs: jax.Array) -> jax.Array:
        cell = eqx.combine(weights, static)
        scan = el.CheckpointedScan(lambda h, x: (jax.vmap(cell)(x, h), None))
        return jnp.mean(scan(jnp.zeros((BATCH, WIDTH)), xs)[0] ** 2)

    size = f"{LENGTH} steps, {BATCH} sequences, width {WIDTH}"
    return [
        _comparison(f"GRU: {size}", loss, el.DebugNonFinite(loss), args),
        _comparison(
            f"Gradient of a GRU: {size}",
            jax.grad(loss),
            el.DebugNonFinite(jax.grad(loss)),
            args,
        ),
    ]


def _comparison(
    title: str, off: Callable[..., Any], on: Callable[..., Any], args: Any
) -> Comparison:
    return Comparison(
        title,
        [Case("as it is", off, args), Case("DebugNonFinite", on, args)],
        [time_ratio("DebugNonFinite", "as it is", 3)],
    )
