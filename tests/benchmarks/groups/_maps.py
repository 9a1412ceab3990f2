"""Maps in chunks, forward and in reverse, of lengths that chunks divide and do not."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

import eqloop as el

from .._claims import Claim, compile_ratio, memory, memory_ratio, time_ratio
from .._comparison import Comparison
from .._measure import Case

ROWS, UNEVEN, CHUNK_SIZE, WIDTH = 4096, 4597, 256, 1024
PEERS = ("powerpax", "`lax.map`", "netket")
MLP = f"MLP of width {WIDTH}"


def maps() -> Sequence[Comparison]:
    """An MLP in chunks of 256 rows; gradients added up; chunks that fit a budget."""
    return [*_in_chunks(ROWS), *_in_chunks(UNEVEN), _accumulated(), _budgets()]


def _in_chunks(rows: int) -> list[Comparison]:
    params, static, x = _problem(rows)

    def forward(apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, x: apply(eqx.combine(params, static), x)

    def backward(apply: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda *args: jnp.sum(forward(apply)(*args) ** 2))

    title = f"{MLP} over {rows} rows in chunks of {CHUNK_SIZE}"
    compiling = _beside(compile_ratio, 0.7) if rows % CHUNK_SIZE else []
    return [
        Comparison(
            f"{what}: {title}",
            [Case(name, use(f), (params, x), package) for name, f, package in MAPS],
            [*_beside(time_ratio, time), *_beside(memory_ratio, nbytes), *compiling],
            compile_rounds=7,
        )
        for what, use, time, nbytes in (
            ("Forward", forward, 1.05, 1.0),
            ("Gradient of the weights", backward, 1.1, 0.12),
        )
    ]


def _accumulated() -> Comparison:
    """The memory of one chunk's gradient, whatever the number of rows.

    The weights are small beside what a chunk computes: the gradient of one chunk must
    be there before it can be added to that of the others.
    """
    chunk_size, width = 1024, 256

    def case(rows: int) -> Case:
        params, static, x = _problem(rows, width)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            one = lambda model, x: jnp.sum(model(x) ** 2)
            mean = el.ChunkedVmap(one, chunk_size, in_axes=(None, 0), reduce="mean")
            return mean(eqx.combine(params, static), x)

        return Case(f"{rows} rows", jax.grad(loss), (params, x))

    one, *more = [case(rows) for rows in (chunk_size, ROWS, UNEVEN, 16 * ROWS)]
    return Comparison(
        f'Gradient of the mean, reduce="mean": MLP of width {width} in chunks of '
        f"{chunk_size}",
        [one, *more],
        [memory_ratio(other.name, one.name, 1.3) for other in more],
        rounds=3,
    )


def _budgets() -> Comparison:
    params, static, x = _problem(ROWS)

    def case(mebibytes: int) -> Case:
        budget = el.Budget(mebibytes * 2**20)

        def gradient(params: Any, x: jax.Array, ct: jax.Array) -> Any:
            run = lambda p: el.ChunkedVmap(eqx.combine(p, static), budget)(x)
            return jax.vjp(run, params)[1](ct)

        return Case(f"Budget({mebibytes} MiB)", gradient, (params, x, x))

    cases = {mebibytes: case(mebibytes) for mebibytes in (8, 16, 32, 64)}
    return Comparison(
        f"Gradient of the weights within a budget: {MLP} over {ROWS} rows",
        list(cases.values()),
        [memory(case.name, size * 2**20) for size, case in cases.items()],
        rounds=5,
    )


def _problem(rows: int, width: int = WIDTH) -> tuple[Any, Any, jax.Array]:
    model = eqx.nn.MLP(64, 64, width, 2, jax.nn.silu, key=jr.key(0))
    params, static = eqx.partition(model, eqx.is_array)
    return params, static, jr.normal(jr.key(1), (rows, 64))


def _beside(claim: Callable[..., Claim], at_most: float) -> list[Claim]:
    return [claim("ChunkedVmap", peer, at_most) for peer in PEERS]


def _ours(f: Callable[..., Any], x: jax.Array) -> jax.Array:
    return el.ChunkedVmap(f, CHUNK_SIZE)(x)


def _lax_map(f: Callable[..., Any], x: jax.Array) -> jax.Array:
    return lax.map(f, x, batch_size=CHUNK_SIZE)


def _powerpax(f: Callable[..., Any], x: jax.Array) -> jax.Array:
    import powerpax

    return powerpax.chunked_vmap(f, CHUNK_SIZE)(x)


def _netket(f: Callable[..., Any], x: jax.Array) -> jax.Array:
    import netket

    # Its gradient takes no arrays that the function closes over.
    params, static = eqx.partition(f, eqx.is_array)
    row = lambda params, x: eqx.combine(params, static)(x)
    mapped = netket.jax.vmap_chunked(row, in_axes=(None, 0), chunk_size=CHUNK_SIZE)
    return mapped(params, x)


MAPS = (
    ("`jax.vmap`", lambda f, x: jax.vmap(f)(x), None),
    ("`lax.map`", _lax_map, None),
    ("powerpax", _powerpax, "powerpax"),
    ("netket", _netket, "netket"),
    ("ChunkedVmap", _ours, None),
)
