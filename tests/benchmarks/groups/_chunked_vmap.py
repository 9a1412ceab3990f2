"""A map in chunks, forward and in reverse."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

import eqloop as el

from .._claims import Claim, memory, time_ratio
from .._comparison import Comparison
from .._measure import Case

ROWS, CHUNK_SIZE, WIDTH = 4096, 256, 1024


def chunked_vmap() -> Sequence[Comparison]:
    """An MLP over 4096 rows in chunks of 256."""
    model = eqx.nn.MLP(64, 64, WIDTH, 2, jax.nn.silu, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    args = (params, jr.normal(jr.key(1), (ROWS, 64)))

    def forward(apply: Callable[..., Any]):
        return lambda params, rows: apply(eqx.combine(params, static), rows)

    def backward(apply: Callable[..., Any]):
        return jax.grad(lambda *args: jnp.sum(forward(apply)(*args) ** 2))

    title = f"MLP of width {WIDTH} over {ROWS} rows in chunks of {CHUNK_SIZE}"
    return [
        Comparison(f"Forward: {title}", _cases(forward, args), _beside_peers(1.05)),
        Comparison(
            f"Gradient of the weights: {title}",
            _cases(backward, args),
            [memory("ChunkedVmap", 15e6), *_beside_peers(1.1)],
        ),
    ]


def _cases(use: Callable[..., Any], args: tuple[Any, ...]) -> list[Case]:
    return [
        Case("`jax.vmap`", use(lambda f, rows: jax.vmap(f)(rows)), args),
        Case("`lax.map`", use(_lax_map), args),
        Case("powerpax", use(_powerpax), args, requires="powerpax"),
        Case("netket", use(_netket), args, requires="netket"),
        Case("ChunkedVmap", use(_ours), args),
    ]


def _beside_peers(at_most: float) -> list[Claim]:
    return [
        time_ratio("ChunkedVmap", peer, at_most) for peer in ("powerpax", "`lax.map`")
    ]


def _ours(f: Callable[..., Any], rows: jax.Array) -> jax.Array:
    return el.ChunkedVmap(f, CHUNK_SIZE)(rows)


def _lax_map(f: Callable[..., Any], rows: jax.Array) -> jax.Array:
    return lax.map(f, rows, batch_size=CHUNK_SIZE)


def _powerpax(f: Callable[..., Any], rows: jax.Array) -> jax.Array:
    import powerpax

    return powerpax.chunked_vmap(f, CHUNK_SIZE)(rows)


def _netket(f: Callable[..., Any], rows: jax.Array) -> jax.Array:
    import netket

    return netket.jax.vmap_chunked(f, chunk_size=CHUNK_SIZE)(rows)
