"""Runs a function of a chunk of rows over all rows, chunk by chunk.

Plain JAX on lists of arrays. Nothing here is differentiated by JAX: the derivatives of
a sweep are sweeps again, which `_row_map.py` makes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._lists import Arrays, Flags, split
from ..checkpointing.engine._step import Step, make_step, reaching
from ._chunks import Chunks


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`(twice, consts, xs) -> (sums, ys)` on the rows of one chunk, traced.

    `twice` marks the rows that are in two chunks; it is `None` if no row can be.

    Attributes:
        step: The traced function. Its consts are `twice`, if any, and `consts`; its `y`
            are `sums` and `ys`.
        num_marks: How many of its consts are `twice`.
        num_sums: How many of its outputs are to be added up over the chunks.
    """

    step: Step
    num_marks: int
    num_sums: int

    @property
    def in_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `consts`, and those of `xs`."""
        return self.step.const_types[self.num_marks :], self.step.x_types

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `sums`, and those of `ys`."""
        return split(self.step.y_types, self.num_sums)

    def __call__(self, twice: Any, consts: Arrays, xs: Arrays) -> tuple[list, list]:
        marks = [] if twice is None else [twice]
        _, outs = self.step([*marks, *consts], [], xs)
        return split(outs, self.num_sums)

    def reached(
        self, consts: Sequence[bool], xs: Sequence[bool], **settings: Any
    ) -> tuple[Flags, Flags]:
        """Which of the outputs depend on the marked inputs, see `reaching`."""
        marks = [False] * self.num_marks
        _, outs = reaching(self.step, [*marks, *consts], [], xs, **settings)
        return outs[: self.num_sums], outs[self.num_sums :]


def trace_chunk(
    f: Callable[[Any, Arrays, Arrays], tuple[Arrays, Arrays]],
    const_types: Sequence[Any],
    x_types: Sequence[Any],
    chunks: Chunks,
) -> Chunk:
    """Traces a function of one chunk, which closes over no tracers."""
    marks = [jax.ShapeDtypeStruct((chunks.size,), bool)] if chunks.overlap else []
    num_sums = 0

    def flat(consts: Arrays, _: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        nonlocal num_sums
        twice, consts = split(consts, len(marks))
        sums, ys = f(twice[0] if twice else None, consts, xs)
        num_sums = len(sums)
        return [], [*sums, *ys]

    step = make_step(flat, [*marks, *const_types], [], x_types)
    return Chunk(step, len(marks), num_sums)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A function of rows, evaluated on all rows with the memory of one chunk.

    Attributes:
        chunk: The function, on one chunk.
        chunks: How the rows are cut.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        shares: For each of the `ys`, whether a row that is in two chunks gets a share
            of its value from both. Otherwise both give it the same value.
    """

    chunk: Chunk
    chunks: Chunks
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    shares: tuple[bool, ...]

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of the sums, and of the `ys` for all rows."""
        sums, of_chunks = self.chunk.out_types
        return sums, [
            resized(aval, axis, self.chunks.size, self.chunks.rows)
            for aval, axis in zip(of_chunks, self.y_axes, strict=True)
        ]

    def run(self, consts: Arrays, xs: Arrays) -> tuple[list[Any], list[Any]]:
        """The sums over all rows, and the `ys` of all rows.

        Arrays are sliced and written where they lie, whatever their axes: to cut them
        into blocks beforehand would copy them.
        """
        size = self.chunks.size

        def body(index: Any, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            sums, ys = state
            first = index * size
            start = jnp.minimum(first, self.chunks.last)
            parts = [
                lax.dynamic_slice_in_dim(x, start, size, axis)
                for x, axis in zip(xs, self.x_axes, strict=True)
            ]
            more, rows = self.chunk(self.twice(start), consts, parts)
            return [a + b for a, b in zip(sums, more, strict=True)], [
                self._write(y, part, start, first, axis, shares)
                for y, part, axis, shares in zip(
                    ys, rows, self.y_axes, self.shares, strict=True
                )
            ]

        sum_types, y_types = self.out_types
        sums = [_varying(jnp.zeros(s.shape, s.dtype), s) for s in sum_types]
        ys = [_varying(lax.empty(y.shape, y.dtype), y) for y in y_types]
        return lax.fori_loop(0, self.chunks.count, body, (sums, ys))

    def twice(self, start: Any) -> Any:
        """Which rows are in two chunks, of those of the chunk with this first row."""
        if not self.chunks.overlap:
            return None
        row = start + jnp.arange(self.chunks.size)
        return (self.chunks.last <= row) & (row < self.chunks.end)

    def _write(
        self, y: Any, part: Any, start: Any, first: Any, axis: int, shares: bool
    ) -> Any:
        if shares and self.chunks.overlap:
            before = lax.dynamic_slice_in_dim(y, start, self.chunks.size, axis)
            written = start + jnp.arange(self.chunks.size) < first
            part = part + jnp.where(along(written, axis, part), before, 0)
        return lax.dynamic_update_slice_in_dim(y, part, start, axis)


def along(rows: Any, axis: int, like: Any) -> Any:
    """A vector of one entry a row, to broadcast against arrays with rows at an axis."""
    return lax.broadcast_in_dim(rows, like.shape, (axis,))


def resized(aval: Any, axis: int, size: int, new: int) -> Any:
    """A type with another size along an axis."""
    return jex.unmapped_aval(new, axis, jex.mapped_aval(size, axis, aval))


def _varying(x: jax.Array, aval: Any) -> jax.Array:
    """`x`, in `shard_map` varying over the axes of the mesh that its type does."""
    return lax.pcast(x, tuple(aval.mat.varying), to="varying")
