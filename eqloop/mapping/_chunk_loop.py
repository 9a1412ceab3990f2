"""Runs a function on all rows, chunk by chunk.

This is plain JAX on lists of arrays, and JAX does not differentiate it: the derivatives
of such a loop are loops over chunks again, of the functions in
`_chunk_derivatives.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    Arrays,
    along,
    axes_of,
    explicit_sharding,
    placed_as,
    vary,
    zero_array,
)
from .._programs import mark
from .._types import Aval, Index, PyTree, Value
from ..progress import tied
from ._chunk_function import ChunkFunction
from ._chunks import Chunks

_State = tuple[list[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class ChunkLoop:
    """A function that is evaluated on all rows with the memory of one chunk.

    Attributes:
        f: The function.
        chunks: How the rows are cut into chunks.
        unroll: How many chunks one iteration of the compiled loop runs.
    """

    f: ChunkFunction
    chunks: Chunks
    unroll: int = 1

    def run(self, consts: Arrays, xs: Arrays) -> tuple[list[Value], list[Value]]:
        """Runs the loop. Returns the sums over all rows, and the `ys` of all rows.

        A chunk is sliced out of the arrays, and its results are written into them,
        along whatever axis the rows are. Reshaping arrays into chunks would copy them.
        """
        chunks, number = self.chunks, self.f.meter.here.open([*consts, *xs])
        if chunks.size == chunks.length:
            state = self.f(chunks.size, None, consts, xs)
            return tied(self.report(number, 0, chunks.size, state), state)

        def body(index: Index, both: tuple[PyTree, _State]) -> tuple[PyTree, _State]:
            number, state = both
            first = index * chunks.size
            state = self._visit(first, chunks.size, state, consts, xs)
            return self.report(number, first, chunks.size, state), state

        sum_types, y_types = self.f.out_types
        state = (
            list(map(zero_array, sum_types)),
            [_buffer(y) for y in y_types],
        )
        number, state = _repeat(chunks.count, body, (number, state), self.unroll)
        if chunks.rest:
            start = chunks.length - chunks.rest
            state = self._visit(start, chunks.rest, state, consts, xs)
            number = self.report(number, start, chunks.rest, state)
        return tied(number, state)

    # The bar, if there is one. A chunk is named by its first new row.

    def report(self, number: Index, first: Index, size: int, state: _State) -> PyTree:
        """Reports a chunk to the bar, if there is one."""
        sums, ys = state
        done = jnp.minimum(first + size, self.chunks.length)
        return self.f.meter.here.report_if_due(number, done, size, [*sums, *ys])

    def visits(self, first: Index) -> PyTree:
        """The `visits` of the chunk with this first new row, see `ChunkFunction`."""
        chunks = self.chunks
        if not (chunks.overlap and self.f.uses_visits):
            return None
        # Only the last chunk has rows before its first new one, and only these rows are
        # in two chunks: here as the second visit, in the chunk before as the first.
        offsets = jnp.arange(chunks.size, dtype=jnp.int32)
        row = jnp.minimum(first, chunks.last) + offsets
        is_twice = (chunks.last <= row) & (row < chunks.end)
        visits = jnp.where(is_twice, jnp.where(row < first, 2, 1), 0)
        return visits.astype(jnp.int8)

    def _visit(
        self, first: Index, size: int, state: _State, consts: Arrays, xs: Arrays
    ) -> _State:
        """Runs one chunk, and adds its results to the state.

        Args:
            first: The first row that no chunk before has had. The last chunk may start
                at an earlier row.
            size: The size of the chunk.
            state: The sums and the `ys` so far.
            consts: The consts.
            xs: The `xs` of all rows.
        """
        sums, ys = state
        visits = self.visits(first)
        start = jnp.minimum(first, self.chunks.length - size)
        mark(start, size)
        parts = [
            _read(x, start, size, axis)
            for x, axis in zip(xs, self.f.x_axes, strict=True)
        ]
        more, new = self.f(size, visits, consts, parts)
        return [a + b for a, b in zip(sums, more, strict=True)], [
            _write(y, part, start, axis, visits if shares else None)
            for y, part, axis, shares in zip(
                ys, new, self.f.y_axes, self.f.shares, strict=True
            )
        ]


def _buffer(aval: Aval) -> jax.Array:
    """An array whose rows will all be written; until then there is anything in it."""
    empty = lax.empty(aval.shape, aval.dtype, out_sharding=explicit_sharding(aval))
    # `lax.empty` gives a type without the mesh when it is traced.
    return vary(placed_as(empty, aval), axes_of(aval))


def _repeat(
    count: int, body: Callable[[PyTree, PyTree], PyTree], state: PyTree, unroll: int
) -> PyTree:
    """A `lax.fori_loop` that JAX does not differentiate.

    JAX turns a `fori_loop` with a static trip count into a `scan`, so that it can be
    differentiated. XLA takes longer to compile that than a `while_loop`.
    """
    if unroll > 1:
        return lax.fori_loop(0, count, body, state, unroll=unroll)
    more = lambda loop: loop[0] < count
    once = lambda loop: (loop[0] + 1, body(*loop))
    _, state = lax.while_loop(more, once, (jnp.int32(0), state))
    return state


def _read(x: Value, start: Index, size: int, axis: int) -> Value:
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)


def _write(y: Value, part: Value, start: Index, axis: int, visits: PyTree) -> Value:
    """Writes rows, or adds them where they have been written before."""
    if visits is not None:
        before = _read(y, start, part.shape[axis], axis)
        part = part + jnp.where(along(visits == 2, (axis,), part), before, 0)
    return lax.dynamic_update_slice_in_dim(
        y, part, start, axis, allow_negative_indices=False
    )
