"""The loop around a step: its length, its direction, its axes, and what is kept."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, put_on_mesh
from ..._compat import is_widened
from ..._programs import mark
from ..._types import Aval, Index, Value
from ...progress import NO_BARS, Meter


@dataclasses.dataclass(frozen=True)
class Loop:
    """Everything about a loop but its step and its schedule.

    A step has a position, which counts in the order of execution, and an index, which
    is its place in `xs` and `ys`. The two differ under `reverse`.

    Attributes:
        length: How many steps.
        reverse: Whether the last element of `xs` comes first.
        unroll: How many steps the innermost loops run per iteration.
        x_axes: For every leaf of `xs` the axis that is looped over. The leaves are
            indexed along it where it lies: moving it to the front would copy them.
        kept: The indices of the steps of which `ys` has a row, in the order of the
            rows; `None` is for all of them.
        meter: Its progress bars.
        batch: How many examples run in it side by side.
        base: The index of its first element of `xs`, if `xs` has others before.
        stops: Whether it ends, before its length, once the first leaf of the carry is
            false.
        starts: For leaves of the carry, the number that each starts from, if that is
            known while tracing. There may be more leaves.
        carry_paths: What the user calls the leaves of the carry, if that is known.
    """

    length: int
    reverse: bool = False
    unroll: int = 1
    x_axes: tuple[int, ...] = ()
    kept: range | None = None
    meter: Meter = NO_BARS
    batch: int = 1
    base: int = 0
    stops: bool = False
    starts: tuple[int | None, ...] = ()
    # Loops of one program are one to all that is remembered, whatever they are called.
    carry_paths: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def rows(self) -> int:
        """How many rows `ys` has."""
        return self.length if self.kept is None else len(self.kept)

    @property
    def gaps(self) -> tuple[int, int, int]:
        """How many steps are run before, between and after those that are kept."""
        kept = range(self.length) if self.kept is None else self.kept
        if not kept:
            return self.length, 0, 0
        between = abs(kept.step) - 1 if len(kept) > 1 else 0
        low, high = sorted((kept[0], kept[-1]))
        ends = low, self.length - 1 - high
        before, after = reversed(ends) if self.reverse else ends
        return before, between, after

    @property
    def descends(self) -> bool:
        """Whether the first step that is kept has the last row of `ys`."""
        return self.reverse != (self.kept is not None and self.kept.step < 0)

    def padded_starts(self, count: int) -> list[int | None]:
        """The `starts` of so many leaves."""
        return [*self.starts, *[None] * (count - len(self.starts))]

    def index(self, position: Index) -> Index:
        """The place in `xs` and `ys` of the step at a position."""
        index = self.length - 1 - position if self.reverse else position
        return index + self.base if self.base else index

    def row(self, index: Index) -> tuple[Index, bool | jax.Array]:
        """The row of `ys` for the step at an index, and whether it is kept.

        For a step that is not kept it is some row, provided that there are any.
        """
        if self.kept is None:
            return index, True
        row, offset = jnp.divmod(index - self.kept.start, self.kept.step)
        is_kept = (offset == 0) & (row >= 0) & (row < self.rows)
        return jnp.clip(row, 0, self.rows - 1), is_kept

    def z(self, zs: Arrays, index: Index) -> list[Value]:
        """The rows for the step at an index, or zeros if it is not kept."""
        row, is_kept = self.row(index)
        at = [element(z, row) for z in zs]
        return [jnp.where(is_kept, z, jnp.zeros_like(z)) for z in at]

    def x(self, xs: Arrays, position: Index) -> list[Value]:
        """The element of `xs` that the step at a position gets."""
        at = self.index(position)
        mark(at)
        return [element(x, at, axis) for x, axis in zip(xs, self.x_axes, strict=True)]

    def block(self, xs: Arrays, position: Index, count: int) -> list[Value]:
        """The elements of `count` steps from a position on, as a smaller `xs`."""
        start = self.block_start(position, count)
        mark(start, count)
        return [
            part(x, start, count, axis) for x, axis in zip(xs, self.x_axes, strict=True)
        ]

    def block_start(self, position: Index, count: int) -> Value:
        """The smallest index among `count` steps from a position on."""
        return self.length - count - position if self.reverse else position

    def part(self, length: int) -> "Loop":
        """The same loop over fewer steps: all are run and kept, and there is no bar."""
        return dataclasses.replace(
            self, length=length, kept=None, meter=NO_BARS, stops=False, starts=()
        )

    def cut_at(self, position: int) -> tuple["Loop", "Loop"]:
        """The steps before a position, without outputs, and those from there on."""
        after = self.length - position
        base, first = (after, 0) if self.reverse else (0, position)
        head = dataclasses.replace(self.part(position), base=base)
        kept = self.kept
        if kept is not None:
            kept = range(kept.start - first, kept.stop - first, kept.step)
            kept = None if kept == range(after) else kept
        rest = dataclasses.replace(self, length=after, kept=kept, base=first, starts=())
        return head, rest

    def in_blocks(self, size: int) -> "Loop":
        """The loop over blocks of so many steps."""
        if size == 1:
            return self
        return dataclasses.replace(self, length=self.length // size, unroll=1)


def zero() -> jax.Array:
    """Where a traced counter starts."""
    return put_on_mesh(jnp.zeros((), jnp.int32))


def element(x: Value, index: Index, axis: int = 0) -> Value:
    """`x[index]` along an axis, for an index that is known to be in range."""
    x, index = _in_place(x, index)
    return lax.dynamic_index_in_dim(
        x, index, axis, keepdims=False, allow_negative_indices=False
    )


def part(x: Value, start: Index, count: int, axis: int = 0) -> Value:
    """`x[start : start + count]` along an axis, for a part that is in range."""
    x, start = _in_place(x, start)
    return lax.dynamic_slice_in_dim(x, start, count, axis, allow_negative_indices=False)


def _in_place(x: Value, index: Index) -> tuple[Value, Index]:
    """An array of which XLA converts no more than the slice at the index.

    Behind a barrier together with the index, the array is not the same at every step as
    far as XLA can see. So it leaves the conversion in the loop, and fuses it there with
    the slice.
    """
    if not is_widened(x.dtype):
        return x, index
    return lax.optimization_barrier((x, jnp.asarray(index)))


def opaque(arrays: Arrays) -> list[Value]:
    """Arrays for loops in loops: XLA must not know that they are a number, repeated.

    The cotangent of a mean is one, and so is `jnp.ones`. XLA repeats the number within
    the outer loop, to the size of the whole array, for the inner one to read a few
    entries of: the time of a step would grow with the length of the loop.
    """
    return [lax.optimization_barrier(x) if jnp.ndim(x) else x for x in arrays]


def put_part(buffer: Value, x: Value, start: Index, axis: int = 0) -> Value:
    """`buffer` with the part from `start` on along an axis replaced; in place."""
    return lax.dynamic_update_slice_in_dim(
        buffer, x, start, axis, allow_negative_indices=False
    )


def store(buffer: Value, x: Value, index: Index, axis: int = 0) -> Value:
    """`buffer` with `x` at an index along an axis; XLA does it in place."""
    return lax.dynamic_update_index_in_dim(
        buffer, x, index, axis, allow_negative_indices=False
    )


def nbytes(types: Iterable[Aval]) -> int:
    """The bytes of arrays of these types."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in types)
