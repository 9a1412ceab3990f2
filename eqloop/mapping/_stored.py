"""A map over rows for which a policy has some of its residuals stored, for all rows.

Plain JAX, with JAX's own derivatives. To store something of every row is to hold arrays
of all rows anyway, so here the rows are cut into blocks, which copies them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._partition import Arrays
from ..checkpointing.engine._forward import Saveable
from ._chunks import Chunks
from ._sweep import Sweep, zeros


def run_stored(
    sweep: Sweep, policy: Saveable, consts: Arrays, xs: Arrays, back: Any = None
) -> tuple[tuple[list[Any], list[Any]], Any, Any]:
    """Runs a sweep, and stores what a policy says.

    Args:
        sweep: The sweep.
        policy: Which residuals of a chunk may be stored.
        consts: What is the same for every row.
        xs: What has rows.
        back: A number whose cotangent is that of the bar of the backward sweep, if
            there is to be one; it comes out again.

    Returns:
        The sums and the `ys`, that number, and the number of the sweep's own bar.
    """
    rows, chunks = sweep.rows, sweep.chunks

    # In the body of a loop there is nothing with which to merge it.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def evaluate(visits: Any, consts: Arrays, parts: Arrays) -> tuple[list, list]:
        size = parts[0].shape[rows.x_axes[0]]
        return rows(size, visits, consts, parts)

    def body(state: Any, inputs: Any) -> tuple[Any, Arrays]:
        (number, back, sums), (index, parts) = state, inputs
        first = index * chunks.size
        back = rows.meter.back.watch(back, chunks.rows - first, chunks.size)
        more, ys = evaluate(sweep.visits(first), consts, parts)
        sums = list(map(jnp.add, sums, more))
        number = sweep.tell(number, first, chunks.size, (sums, ys))
        return (number, back, sums), ys

    blocks = [_cut(x, axis, chunks) for x, axis in zip(xs, rows.x_axes, strict=True)]
    sums = [zeros(aval) for aval in rows.out_types[0]]
    state = (rows.meter.here.open([*consts, *xs]), back, sums)
    indices = jnp.arange(chunks.count, dtype=jnp.int32)
    state, ys = lax.scan(body, state, (indices, blocks))
    number, back, sums = state
    ys = [_join(y, axis, chunks) for y, axis in zip(ys, rows.y_axes, strict=True)]
    if chunks.rest:
        start = chunks.rows - chunks.rest
        parts = list(map(functools.partial(_rows, start, chunks.rows), xs, rows.x_axes))
        back = rows.meter.back.watch(back, chunks.rows - start, chunks.rest)
        more, last = evaluate(None, consts, parts)
        sums = list(map(jnp.add, sums, more))
        ys = [
            jnp.concatenate(pair, axis)
            for *pair, axis in zip(ys, last, rows.y_axes, strict=True)
        ]
        number = sweep.tell(number, start, chunks.rest, (sums, ys))
    return (list(sums), ys), back, number


def _cut(x: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The chunks of full size of an array, along a new leading axis."""
    if chunks.overlap:
        last = _rows(chunks.last, chunks.rows, x, axis)
        x = jnp.concatenate([_rows(0, chunks.end, x, axis), last], axis)
    x = _rows(0, chunks.count * chunks.size, x, axis)
    shape = (*x.shape[:axis], chunks.count, chunks.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join(y: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The rows, from chunks along a leading axis."""
    y = jnp.moveaxis(y, 0, axis)
    y = y.reshape(*y.shape[:axis], chunks.count * chunks.size, *y.shape[axis + 2 :])
    if not chunks.overlap:
        return y
    last, end, again = chunks.last, chunks.end, chunks.end + chunks.overlap
    before, after = _rows(0, last, y, axis), _rows(again, y.shape[axis], y, axis)
    once, twice = _rows(last, end, y, axis), _rows(end, again, y, axis)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        twice = once / 2 + twice / 2  # the same value, and half of the cotangent each
    return jnp.concatenate([before, twice, after], axis)


def _rows(start: int, stop: int, x: jax.Array, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=axis)
