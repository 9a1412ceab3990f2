"""A function of rows, on lists of arrays: traced for chunks of any size."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._lists import Arrays, Flags, split
from .._programs import joined, pruned, run, traced
from .._reaching import reached
from ..progress import Gauge, Meter, guarded, muted


@dataclasses.dataclass(frozen=True)
class Rows:
    """`(visits, consts, xs) -> (sums, ys)`, for any number of rows.

    `visits` is a vector with an entry for each of them: 0 if only this chunk has the
    row, 1 if it is in the next chunk as well, and 2 if it has been in the last. It is
    left out if no row is in two.

    Attributes:
        f: What traces the function: from these rows, a number of rows and whether there
            are `visits` to the program of a `Chunk`, and how many sums that has.
        length: How many rows there are in all.
        const_types: The types of `consts`, which are the same for every row.
        x_types: The types of `xs`, of one row.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        shares: For each of the `ys`, whether a row that is in two chunks gets a share
            of its value from both. Otherwise both give it the same value.
        uses_visits: Whether the function depends on `visits`.
        probe: The size of a chunk, and whether it has `visits`, for which to trace
            in order to find out what is returned.
        meter: The progress bars of the map, if it has any.
        is_again: Whether it is run again, so that loops in it show no bars.
        is_guarded: Whether its callbacks close all bars when they raise.
    """

    f: Callable[["Rows", int, bool], tuple[jex.ClosedJaxpr, int]]
    length: int
    const_types: tuple[Any, ...]
    x_types: tuple[Any, ...]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    shares: Flags
    uses_visits: bool
    probe: tuple[int, bool]
    meter: Meter | None = None
    is_again: bool = False
    is_guarded: bool = False

    def again(self, backward: bool) -> "Rows":
        """The same to be run again: without its bars and those of loops in it.

        Args:
            backward: Whether the bar of its backward sweep is left out, too.
        """
        meter = self.meter
        if meter is not None:
            meter = None if backward else meter.again
        return dataclasses.replace(self, meter=meter, is_again=True)

    @property
    def gauge(self) -> Gauge | None:
        """The bar of this sweep, if it has one."""
        return None if self.meter is None else self.meter.here

    def chunk(self, size: int, has_visits: bool) -> "Chunk":
        """The function, traced on so many rows."""
        return _chunk(self, size, has_visits and self.uses_visits)

    @property
    def in_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `consts`, and those of `xs` for all rows."""
        return list(self.const_types), stacked(self.x_types, self.length, self.x_axes)

    @property
    def y_types(self) -> tuple[Any, ...]:
        """The types of `ys`, of one row."""
        size, _ = self.probe
        _, of_chunk = self.chunk(*self.probe).out_types
        return tuple(
            jex.mapped_aval(size, axis, aval)
            for aval, axis in zip(of_chunk, self.y_axes, strict=True)
        )

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `sums`, and those of `ys` for all rows."""
        sums, _ = self.chunk(*self.probe).out_types
        return sums, stacked(self.y_types, self.length, self.y_axes)

    def reached(
        self, consts: Sequence[bool], xs: Sequence[bool], **settings: Any
    ) -> tuple[Flags, Flags]:
        """Which of the outputs depend on the marked inputs, see `reached`."""
        chunk = self.chunk(*self.probe)
        marks = joined(chunk.marks(tuple(consts), tuple(xs)))
        outs = reached(chunk.program, marks, **settings)
        return tuple(outs[: chunk.num_sums]), tuple(outs[chunk.num_sums :])


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`(visits, consts, xs) -> (sums, ys)` on the rows of one chunk, traced.

    Attributes:
        program: `[*visits, *consts, *xs] -> [*sums, *ys]`.
        has_visits: Whether it has them; otherwise what it is called with is ignored.
        num_sums: How many of its outputs are to be added up over the chunks.
    """

    program: jex.ClosedJaxpr
    has_visits: bool
    num_sums: int

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `sums`, and those of `ys`."""
        return split(self.program.out_avals, self.num_sums)

    def marks(self, consts: Flags, xs: Flags) -> tuple[Flags, Flags]:
        """The marks of all inputs, from those of `consts` and of `xs`."""
        return ((False,) * self.has_visits + consts, xs)

    def __call__(self, visits: Any, consts: Arrays, xs: Arrays) -> tuple[list, list]:
        visits = [visits] if self.has_visits else []
        return split(run(self.program, *visits, *consts, *xs), self.num_sums)


@functools.lru_cache(maxsize=256)
def _chunk(rows: Rows, size: int, has_visits: bool) -> Chunk:
    program, num_sums = rows.f(rows, size, has_visits)
    if rows.is_guarded:
        program = guarded(program)
    if rows.is_again:
        program = muted(program, backward=False)
    return Chunk(pruned(program), has_visits, num_sums)


@dataclasses.dataclass(frozen=True)
class RowsFunction:
    """Traces `f(size, visits, consts, xs) -> (sums, ys)`, which closes over no tracers.

    `visits` is `None` if no row is in two chunks.
    """

    f: Callable[[int, Any, Arrays, Arrays], tuple[Arrays, Arrays]]

    def __call__(
        self, rows: Rows, size: int, has_visits: bool
    ) -> tuple[jex.ClosedJaxpr, int]:
        visits = [visits_type(size)] if has_visits else []
        num_sums = 0

        def flat(*inputs: Any) -> list[Any]:
            nonlocal num_sums
            counts = len(visits), len(rows.const_types)
            visits_, consts, xs = split(inputs, *counts)
            sums, ys = self.f(size, visits_[0] if visits else None, consts, xs)
            num_sums = len(sums)
            return [*sums, *ys]

        xs = stacked(rows.x_types, size, rows.x_axes)
        return traced(flat, [*visits, *rows.const_types, *xs]), num_sums


def visits_type(size: int) -> Any:
    """The type of `visits` for so many rows."""
    return jax.ShapeDtypeStruct((size,), jnp.int8)


def stacked(types: Sequence[Any], size: int, axes: Sequence[int]) -> list[Any]:
    """The types of so many rows, from those of one."""
    return [
        jex.unmapped_aval(size, axis, aval)
        for aval, axis in zip(types, axes, strict=True)
    ]


def along(rows: Any, axis: int, like: Any) -> Any:
    """A vector of one entry a row, to broadcast against arrays with rows at an axis."""
    return lax.broadcast_in_dim(rows, like.shape, (axis,))
