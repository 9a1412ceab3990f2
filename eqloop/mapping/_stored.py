"""A map over rows for which a policy has some of its residuals stored, for all rows.

Plain JAX, with JAX's own derivatives. To store something of every row is to hold arrays
of all rows anyway, so here the rows are cut into blocks, which copies them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._lists import Arrays
from ..checkpointing.engine._forward import Saveable
from ._chunks import Chunks
from ._sweep import Sweep


def run_stored(sweep: Sweep, policy: Saveable, consts: Arrays, xs: Arrays) -> Arrays:
    """The `ys` of a sweep without sums, which stores what a policy says."""
    chunks = sweep.chunks
    evaluate = jax.checkpoint(
        lambda twice, *inputs: sweep.chunk(twice, *inputs)[1],
        policy=policy,
        prevent_cse=False,  # the body of a loop: there is nothing to merge it with
    )

    def body(_: None, inputs: Any) -> tuple[None, Arrays]:
        index, parts = inputs
        twice = sweep.twice(jnp.minimum(index * chunks.size, chunks.last))
        return None, evaluate(twice, consts, parts)

    blocks = [_cut(x, axis, chunks) for x, axis in zip(xs, sweep.x_axes, strict=True)]
    _, ys = lax.scan(body, None, (jnp.arange(chunks.count), blocks))
    return [_join(y, axis, chunks) for y, axis in zip(ys, sweep.y_axes, strict=True)]


def _cut(x: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The chunks of an array, along a new leading axis."""
    if chunks.overlap:
        last = _rows(x, chunks.last, chunks.rows, axis)
        x = jnp.concatenate([_rows(x, 0, chunks.end, axis), last], axis)
    shape = (*x.shape[:axis], chunks.count, chunks.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join(y: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """All rows, from chunks along a leading axis."""
    y = jnp.moveaxis(y, 0, axis)
    y = y.reshape(*y.shape[:axis], chunks.count * chunks.size, *y.shape[axis + 2 :])
    if not chunks.overlap:
        return y
    last, end, again = chunks.last, chunks.end, chunks.end + chunks.overlap
    before, after = _rows(y, 0, last, axis), _rows(y, again, y.shape[axis], axis)
    once, twice = _rows(y, last, end, axis), _rows(y, end, again, axis)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        twice = once / 2 + twice / 2  # the same value, and half of the cotangent each
    return jnp.concatenate([before, twice, after], axis)


def _rows(x: jax.Array, start: int, stop: int, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=axis)
