"""The function that runs on each chunk of rows, traced for chunks of any size."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import Arrays, Flags, split, stack_type
from .._programs import joined, pruned, reached, run, traced
from .._types import Aval, PyTree, Value
from ..progress import NO_BARS, BarChange, Meter


@dataclasses.dataclass(frozen=True)
class ChunkFunction:
    """`(visits, consts, xs) -> (sums, ys)`, for any number of rows.

    The last chunk may overlap the one before it, so that all chunks have one size. Then
    some rows are in two chunks, and must not count twice. `visits` tells which, with an
    entry for each row: 0 if the row is only in this chunk, 1 if it is also in the next
    one, and 2 if it was also in the one before:

        chunks        [0 0 0 1 1]
                            [2 2 0 0 0]

    It is left out if no row is in two chunks.

    Attributes:
        trace: A function that traces the chunk function, given this object, a number
            of rows, and whether there are `visits`. The program is
            `[*visits, *consts, *xs] -> [*sums, *ys]`.
        length: How many rows there are in all.
        const_types: The types of `consts`, which are the same for every row.
        x_types: The types of `xs`, of one row.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        shares: For each of the `ys`, whether the two chunks of a row each compute a
            share of its value, and the shares are added. Otherwise both compute the
            whole value, and one of them is written over.
        num_sums: How many of its outputs are sums.
        uses_visits: Whether the function depends on `visits`.
        probe: A size of chunk, and whether it has `visits`, to trace the function with
            when only the types of its outputs are needed.
        mesh_axis: The explicit axes of a mesh that the rows are split over, if any.
        meter: The progress bars of the map.
        changes: The changes of progress bars within the function.
        origin: The function that this one is a derivative of, or itself, if a row can
            see its chunk. Then both have the same chunks. `None` if it cannot.
    """

    trace: Callable[["ChunkFunction", int, bool], jex.ClosedJaxpr]
    length: int
    const_types: tuple[Aval, ...]
    x_types: tuple[Aval, ...]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    shares: Flags
    num_sums: int
    uses_visits: bool
    probe: tuple[int, bool]
    mesh_axis: Hashable = None
    meter: Meter = NO_BARS
    changes: tuple[BarChange, ...] = ()
    origin: "ChunkFunction | None" = None

    def with_bars(self, change: BarChange) -> "ChunkFunction":
        """The same with other bars."""
        changes = (*self.changes, *[change] * (change not in self.changes))
        return dataclasses.replace(
            self, meter=change.meter(self.meter), changes=changes
        )

    def program(self, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        """The program for a chunk: `[*visits, *consts, *xs] -> [*sums, *ys]`."""
        return _chunk_program(self, size, has_visits and self.uses_visits)

    def __call__(
        self, size: int, visits: PyTree, consts: Arrays, xs: Arrays
    ) -> tuple[list[Value], list[Value]]:
        """The sums and the `ys` of a chunk; `visits` may be `None`."""
        program = self.program(size, visits is not None)
        visits = [visits] * self.num_visits(visits is not None)
        return split(run(program, *visits, *consts, *xs), self.num_sums)

    def num_visits(self, has_visits: bool) -> int:
        """How many inputs of its program are `visits`: one or none."""
        return int(has_visits and self.uses_visits)

    def marks(self, has_visits: bool, consts: Flags, xs: Flags) -> tuple[Flags, Flags]:
        """The marks of all inputs of its program, from those of `consts` and `xs`."""
        return ((False,) * self.num_visits(has_visits) + consts, xs)

    @property
    def in_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `consts`, and those of `xs` for all rows."""
        xs = self.stacked(self.x_types, self.length, self.x_axes)
        return list(self.const_types), xs

    @property
    def y_types(self) -> tuple[Aval, ...]:
        """The types of `ys`, of one row."""
        size, _ = self.probe
        of_chunk = self.program(*self.probe).out_avals[self.num_sums :]
        return tuple(
            jex.mapped_aval(size, axis, aval)
            for aval, axis in zip(of_chunk, self.y_axes, strict=True)
        )

    @property
    def out_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `sums`, and those of `ys` for all rows."""
        sums = self.program(*self.probe).out_avals[: self.num_sums]
        return list(sums), self.stacked(self.y_types, self.length, self.y_axes)

    def stacked(
        self, types: Sequence[Aval], size: int, axes: Sequence[int]
    ) -> list[Aval]:
        """The types of arrays with so many rows, from the types of one row."""
        return [
            stack_type(aval, size, axis, self.mesh_axis)
            for aval, axis in zip(types, axes, strict=True)
        ]

    def reached(
        self, consts: Sequence[bool], xs: Sequence[bool], **settings: Any
    ) -> tuple[Flags, Flags]:
        """Which of the outputs depend on the marked inputs, see `reached`."""
        size, has_visits = self.probe
        marks = joined(self.marks(has_visits, tuple(consts), tuple(xs)))
        outs = reached(self.program(size, has_visits), marks, **settings)
        return outs[: self.num_sums], outs[self.num_sums :]


@functools.lru_cache(maxsize=256)
def _chunk_program(f: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
    program = f.trace(f, size, has_visits)
    for change in f.changes:
        program = change(program)
    return pruned(program)


@dataclasses.dataclass(frozen=True)
class ChunkTracer:
    """Traces `f(size, visits, consts, xs) -> (sums, ys)`, which closes over no tracers.

    `visits` is `None` if no row is in two chunks.
    """

    f: Callable[[int, PyTree, Arrays, Arrays], tuple[Arrays, Arrays]]

    def __call__(
        self, function: ChunkFunction, size: int, has_visits: bool
    ) -> jex.ClosedJaxpr:
        visits = [visits_type(size)] if has_visits else []

        def flat(*inputs: Value) -> list[Value]:
            counts = len(visits), len(function.const_types)
            visits_, consts, xs = split(inputs, *counts)
            sums, ys = self.f(size, visits_[0] if visits else None, consts, xs)
            return [*sums, *ys]

        xs = function.stacked(function.x_types, size, function.x_axes)
        return traced(flat, [*visits, *function.const_types, *xs])


def visits_type(size: int) -> Aval:
    """The type of `visits` for so many rows."""
    return jax.ShapeDtypeStruct((size,), jnp.int8)
