"""A map over rows with a policy, which stores some residuals for all rows.

This is plain JAX, with JAX's own derivatives. The rows are cut into chunks beforehand,
which copies them. But there are arrays with something of all rows anyway, as that is
what the policy stores.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import Arrays, zero_array
from .._types import PyTree, Value
from ..checkpointing import Saveable
from ._chunk_loop import ChunkLoop
from ._chunks import Chunks


def run_stored(
    loop: ChunkLoop, policy: Saveable, consts: Arrays, xs: Arrays, back: PyTree = None
) -> tuple[tuple[list[Value], list[Value]], PyTree, PyTree]:
    """Runs a loop over chunks for JAX to differentiate, under a policy.

    Args:
        loop: The loop over the chunks.
        policy: Which residuals of a chunk may be stored.
        consts: The arrays that are the same for every row.
        xs: The arrays that have rows.
        back: A number that is passed through. On the way back, its cotangent moves the
            bar of the backward sweep, if there is one.

    Returns:
        The sums and the `ys`, that number, and the number of the loop's own bar.
    """
    f, chunks = loop.f, loop.chunks

    # In the body of a loop, XLA cannot merge the second evaluation with the first.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def evaluate(visits: PyTree, consts: Arrays, parts: Arrays) -> tuple[list, list]:
        size = parts[0].shape[f.x_axes[0]]
        return f(size, visits, consts, parts)

    def body(state: PyTree, inputs: PyTree) -> tuple[PyTree, Arrays]:
        (number, back, sums), (index, parts) = state, inputs
        first = index * chunks.size
        back = f.meter.back.watch(back, chunks.length - first, chunks.size)
        more, ys = evaluate(loop.visits(first), consts, parts)
        sums = list(map(jnp.add, sums, more))
        number = loop.report(number, first, chunks.size, (sums, ys))
        return (number, back, sums), ys

    cut = [
        _cut_into_chunks(x, axis, chunks) for x, axis in zip(xs, f.x_axes, strict=True)
    ]
    sums = list(map(zero_array, f.out_types[0]))
    state = (f.meter.here.open([*consts, *xs]), back, sums)
    indices = jnp.arange(chunks.count, dtype=jnp.int32)
    state, ys = lax.scan(body, state, (indices, cut))
    number, back, sums = state
    ys = [_join_chunks(y, axis, chunks) for y, axis in zip(ys, f.y_axes, strict=True)]
    if chunks.rest:
        start = chunks.length - chunks.rest
        parts = list(map(functools.partial(_slice, start, chunks.length), xs, f.x_axes))
        back = f.meter.back.watch(back, chunks.length - start, chunks.rest)
        more, last = evaluate(None, consts, parts)
        sums = list(map(jnp.add, sums, more))
        ys = [
            jnp.concatenate(pair, axis)
            for *pair, axis in zip(ys, last, f.y_axes, strict=True)
        ]
        number = loop.report(number, start, chunks.rest, (sums, ys))
    return (list(sums), ys), back, number


def _cut_into_chunks(x: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The chunks of full size of an array, along a new leading axis."""
    if chunks.overlap:
        last = _slice(chunks.last, chunks.length, x, axis)
        x = jnp.concatenate([_slice(0, chunks.end, x, axis), last], axis)
    x = _slice(0, chunks.count * chunks.size, x, axis)
    shape = (*x.shape[:axis], chunks.count, chunks.size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _join_chunks(y: jax.Array, axis: int, chunks: Chunks) -> jax.Array:
    """The array of all rows, from chunks along a leading axis."""
    y = jnp.moveaxis(y, 0, axis)
    y = y.reshape(*y.shape[:axis], chunks.count * chunks.size, *y.shape[axis + 2 :])
    if not chunks.overlap:
        return y
    # Rows from `last` to `end` are there twice, the second time up to `again`.
    last, end, again = chunks.last, chunks.end, chunks.end + chunks.overlap
    before, after = _slice(0, last, y, axis), _slice(again, y.shape[axis], y, axis)
    once, twice = _slice(last, end, y, axis), _slice(end, again, y, axis)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        twice = once / 2 + twice / 2  # the same value, and half of the cotangent each
    return jnp.concatenate([before, twice, after], axis)


def _slice(start: int, stop: int, x: jax.Array, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, stop, axis=axis)
