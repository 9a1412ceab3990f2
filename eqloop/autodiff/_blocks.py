"""The blocks of a Jacobian: of each output by each input, in either mode.

A direction is known by its index, and made where it is pushed or pulled. So no more of
the identity matrix exists at once than the directions in use.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import Arrays
from .._types import PyTree
from ..checkpointing import Budget
from ..mapping import ChunkedVmap

Blocks = list[list[jax.Array]]
Run = Callable[[Arrays], Any]


def by_rows(
    run: Run, arrays: Arrays, chunk_size: int | Budget | None
) -> tuple[Blocks, PyTree, PyTree]:
    """Reverse mode: pulls back one direction for each number of the outputs."""
    # `run` returns outputs, and others that are not differentiated. A block has the
    # shape of the output, followed by that of the input.
    outs, pull, others = jax.vjp(run, arrays, has_aux=True)
    row = lambda index: pull(_direction(outs, index))[0]
    indices = jnp.arange(num_entries(outs))
    if chunk_size is None:
        rows = jax.vmap(row)(indices)
    else:
        rows = ChunkedVmap(row, chunk_size)(indices)
    blocks = [
        [r[start:stop].reshape(*out.shape, *r.shape[1:]) for r in rows]
        for out, (start, stop) in zip(outs, _spans(outs), strict=True)
    ]
    return blocks, outs, others


def by_columns(
    run: Run,
    arrays: Arrays,
    chunk_size: int | Budget | None,
    evaluate: Run | None = None,
) -> tuple[Blocks, PyTree, PyTree]:
    """Forward mode: pushes one direction for each number of the inputs."""
    # `evaluate` returns as `run` does, for less, if not all of it is of interest. In
    # chunks it is called, as the outputs of none of them are those of all.

    def push(index: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        direction = _direction(arrays, index)
        return jax.jvp(run, (arrays,), (direction,), has_aux=True)

    indices = jnp.arange(num_entries(arrays))
    if chunk_size is None:
        push_all = jax.vmap(push, out_axes=(None, -1, None))
        outs, columns, others = push_all(indices)
    else:
        outs, others = (evaluate or run)(arrays)
        tangents = lambda index: push(index)[1]
        columns = ChunkedVmap(tangents, chunk_size, out_axes=-1)(indices)
    blocks = [
        [
            column[..., start:stop].reshape(*column.shape[:-1], *array.shape)
            for array, (start, stop) in zip(arrays, _spans(arrays), strict=True)
        ]
        for column in columns
    ]
    return blocks, outs, others


def num_entries(arrays: Arrays) -> int:
    """How many numbers there are in arrays."""
    return sum(array.size for array in arrays)


def _spans(arrays: Arrays) -> list[tuple[int, int]]:
    """Where each of the arrays begins and ends among the numbers of all."""
    ends = itertools.accumulate((array.size for array in arrays), initial=0)
    return list(itertools.pairwise(ends))


def _direction(arrays: Arrays, index: jax.Array) -> list[jax.Array]:
    """One for the number of that index, and zero for all others."""
    return [
        (jnp.arange(start, stop) == index).astype(array.dtype).reshape(array.shape)
        for array, (start, stop) in zip(arrays, _spans(arrays), strict=True)
    ]
