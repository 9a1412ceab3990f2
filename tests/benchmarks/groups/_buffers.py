"""Loops whose carry has an array, of which each step writes a row."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from .. import _loops as loops
from .._comparison import Comparison

_STEPS = 64_000


def buffers() -> Sequence[Comparison]:
    """A loop that fills an array of its own length."""
    schedules = el.StoreAll(), el.Recursive(16), el.Budget("512KiB")
    every = loops.lax_scan(), loops.lax_scan_of_remat(), *map(loops.ours, schedules)
    return [
        Comparison(
            f"Gradient of h0 and xs: a row written at each of {_STEPS} steps",
            [loop.case(_gradient, (jnp.ones(()), jnp.ones(_STEPS))) for loop in every],
            rounds=3,
        )
    ]


def _gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    def step(carry: Any, x: jax.Array) -> tuple[Any, None]:
        i, h, rows = carry
        h = jnp.tanh(0.9 * h + x)
        return (i + 1, h, rows.at[i].set(h)), None

    def loss(h: jax.Array, xs: jax.Array) -> jax.Array:
        (_, _, rows), _ = run(step, (jnp.int32(0), h, jnp.zeros(len(xs))), xs)
        return jnp.mean(rows**2)

    return jax.grad(loss, (0, 1))
