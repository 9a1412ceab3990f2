"""The loop around a step: its length and direction, its axes, and the rows of `ys`.

At the end are the functions by which everything in the engine reads and writes rows of
an array: slices, at an index that is known to be in range. XLA does such a write in
place if a loop carries the array. A `lax.cond` that returned the array would copy it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    SumType,
    chosen_sum_type,
    is_type,
    on_mesh,
    pick,
    put_on_mesh,
    stack_type,
)
from ..._compat import is_widened
from ..._programs import mark
from ..._types import Aval, Index, Value
from ...progress import NO_BARS, Meter

# How many leaves of a carry are named, at most.
MOST_PATHS = 4


@dataclasses.dataclass(frozen=True)
class Loop:
    """All that describes a loop, except its step and its schedule.

    A step has a *position*, which counts in the order of execution, and an *index*,
    which is its place in `xs`. The *row* is its place in `ys`, if it has one. For six
    steps in reverse, every second of which is kept (`kept=range(0, 6, 2)`):

        position   0   1   2   3   4   5      (time runs to the right)
        index      5   4   3   2   1   0
        row        -   2   -   1   -   0

    Attributes:
        length: How many steps there are.
        reverse: Whether the last element of `xs` comes first.
        unroll: How many steps the innermost loops run per iteration. A loop that
            `stops` has 1: `lax.fori_loop` unrolls only if the trip count is static.
        x_axes: For every leaf of `xs`, the axis that is looped over. It stays where it
            is, since moving it to the front would copy the whole leaf.
        kept: The indices of the steps that have a row in `ys`, in the order of the
            rows; `None` for all of them.
        meter: Its progress bars.
        batch: How many examples run in it side by side.
        base: The index in `xs` of the loop's first element. It is not 0 for the part of
            a loop in reverse that `cut_at` cuts off: its `xs` are still the whole ones.
        stops: Whether the loop ends early, once the first leaf of the carry is false.
        starts: The integers that leaves of the initial carry are known to be while
            tracing, `None` for those that are not known. Leaves beyond the last entry
            are not known either.
        carry_paths: The user's names for the leaves of the carry, if they are known.
        rewritten: What was done to its step, in sentences for a plan.
        stored: Of how many of the last steps it stores the first leaves of `y`, for its
            way back, and how many leaves these are (`_primal.py`). They are no
            outputs of the user's loop, so `kept` does not apply to them.
        sums: The type in which cotangents of narrower consts are added up. By default
            it is that of where the loop is made.
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
    # Names do not change the program, so they are not part of the key of any cache.
    carry_paths: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    rewritten: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    stored: tuple[int, int] = (0, 0)
    sums: SumType = dataclasses.field(default_factory=chosen_sum_type)

    def noting(self, note: str, leaves: Sequence[Any] | None = None) -> "Loop":
        """The loop with a note of what was done to its step.

        `{}` stands for the marked leaves of the carry. If none is, nothing was done.
        """
        marks = list(map(bool, leaves or ()))
        if leaves is not None and not any(marks):
            return self
        paths = "a leaf" if sum(marks) == 1 else f"{sum(marks)} leaves"
        if len(self.carry_paths) == len(marks):
            paths = listed(pick(self.carry_paths, marks))
        notes = dict.fromkeys((*self.rewritten, note.format(paths)))
        return dataclasses.replace(self, rewritten=tuple(notes))

    @property
    def rows(self) -> int:
        """How many rows `ys` has."""
        return self.length if self.kept is None else len(self.kept)

    def stacked_types(self, y_types: Sequence[Aval]) -> list[Aval]:
        """The types of `ys`, for leaves of `y` of these types."""
        steps, leaves = self.stored
        counts = [steps] * leaves + [self.rows] * (len(y_types) - leaves)
        return list(map(stack_type, y_types, counts))

    @property
    def gaps(self) -> tuple[int, int, int]:
        """The numbers of steps before the first kept one, between two, and after all.

        In the order of execution. In the example above these are 1, 1 and 0.
        """
        kept = range(self.length) if self.kept is None else self.kept
        if not kept:
            return self.length, 0, 0
        between = abs(kept.step) - 1 if len(kept) > 1 else 0
        low, high = sorted((kept[0], kept[-1]))
        # Steps with lower and with higher indices than all that are kept.
        ends = low, self.length - 1 - high
        before, after = reversed(ends) if self.reverse else ends
        return before, between, after

    @property
    def descends(self) -> bool:
        """Whether the rows of `ys` are filled from the last to the first."""
        return self.reverse != (self.kept is not None and self.kept.step < 0)

    def kept_of(self, x: Value, axis: int) -> Value:
        """What of a leaf of `xs` belongs to the steps that have a row in `ys`."""
        if self.kept is None and x.shape[axis] == self.length:
            return x
        kept = range(self.length) if self.kept is None else self.kept
        low = kept if kept.step > 0 else kept[::-1]
        start, stop = (low[0], low[-1] + 1) if low else (0, 0)
        bounds = start + self.base, stop + self.base
        rows = lax.slice_in_dim(x, *bounds, stride=low.step, axis=axis)
        return rows if low is kept else lax.rev(rows, [axis])

    def padded_starts(self, count: int) -> list[int | None]:
        """The `starts`, filled up with `None` for a carry with `count` leaves."""
        return [*self.starts, *[None] * (count - len(self.starts))]

    def index(self, position: Index) -> Index:
        """The index of the step at a position."""
        index = self.length - 1 - position if self.reverse else position
        # Nothing is added for a base of zero, which nearly all loops have.
        return index + self.base if self.base else index

    def row(self, index: Index) -> tuple[Index, bool | jax.Array]:
        """The row of `ys` for the step at an index, and whether the step is kept."""
        if self.kept is None:
            return index, True
        row, offset = jnp.divmod(index - self.kept.start, self.kept.step)
        is_kept = (offset == 0) & (row >= 0) & (row < self.rows)
        # The row of a step that is not kept means nothing, but it is in range, provided
        # that `ys` has any rows: callers read or write it, and select afterwards.
        return jnp.clip(row, 0, self.rows - 1), is_kept

    def row_or_zeros(self, rows: Arrays, index: Index) -> list[Value]:
        """The row of each array for the step at an index; zeros if it is not kept.

        An output that the loop drops has no influence, so its cotangent is zero.
        """
        row, is_kept = self.row(index)
        found = [element(x, row) for x in rows]
        return [jnp.where(is_kept, x, jnp.zeros_like(x)) for x in found]

    def x(self, xs: Arrays, position: Index) -> list[Value]:
        """The element of `xs` that the step at a position gets."""
        index = self.index(position)
        # Every step that is run reads its `x`, even if that has no leaves. So here
        # `DebugNonFinite` is told which step comes next.
        mark(index)
        axes = zip(xs, self.x_axes, strict=True)
        return [element(x, index, axis) for x, axis in axes]

    def block(self, xs: Arrays, position: Index, count: int) -> list[Value]:
        """The elements of `count` steps from a position on, as a smaller `xs`.

        They are in the order of `xs`. `part(count)` is the loop over them.
        """
        start = self.block_start(position, count)
        mark(start, count)
        return [
            part(x, start, count, axis) for x, axis in zip(xs, self.x_axes, strict=True)
        ]

    def block_start(self, position: Index, count: int) -> Value:
        """The smallest index among `count` steps from a position on, without `base`.

        Blocks are for the way back, and a loop that has a base is never reversed.
        """
        return self.length - count - position if self.reverse else position

    def part(self, length: int) -> "Loop":
        """The loop over a block of so many steps.

        All of them are run and have a row in `ys`, and there is no bar.
        """
        return dataclasses.replace(
            self,
            length=length,
            kept=None,
            meter=NO_BARS,
            stops=False,
            starts=(),
            stored=(0, 0),
        )

    def cut_at(self, position: int) -> tuple["Loop", "Loop"]:
        """Two loops: the steps before a position, and those from there on.

        Both index into the whole `xs`, by their `base`.
        """
        # The steps of the first loop are not reversed, and their outputs are not
        # needed.
        after = self.length - position
        # Where the elements of `xs` of the first and of the second loop begin.
        base, first = (after, 0) if self.reverse else (0, position)
        head = dataclasses.replace(self.part(position), base=base)
        kept = self.kept
        if kept is not None:
            kept = range(kept.start - first, kept.stop - first, kept.step)
            # A loop that keeps every step is a plain scan.
            kept = None if kept == range(after) else kept
        rest = dataclasses.replace(self, length=after, kept=kept, base=first, starts=())
        return head, rest

    def of_leaves(self, carry: Sequence[bool], ys: Sequence[bool]) -> "Loop":
        """The loop around a step that has only these leaves."""
        paths, (steps, leaves) = self.carry_paths, self.stored
        return dataclasses.replace(
            self,
            carry_paths=tuple(pick(paths, carry)) if len(paths) == len(carry) else (),
            starts=tuple(pick(self.padded_starts(len(carry)), carry)),
            stored=(steps, sum(ys[:leaves])),
        )

    def in_blocks(self, size: int) -> "Loop":
        """The loop whose steps are blocks of so many steps of this one."""
        if size == 1:
            return self
        return dataclasses.replace(self, length=self.length // size, unroll=1)


def listed(paths: Sequence[str]) -> str:
    """The first few of some paths, and how many more there are."""
    first, rest = paths[:MOST_PATHS], paths[MOST_PATHS:]
    return ", ".join([*first, *[f"{len(rest)} more"] * bool(rest)])


def zero() -> jax.Array:
    """The zero that a traced counter starts from, typed with the mesh in use."""
    # A loop whose counter is on no mesh cannot be batched along an explicit axis of
    # one.
    return put_on_mesh(jnp.zeros((), jnp.int32))


def count_type() -> Aval:
    """The type of such a counter."""
    return on_mesh(jax.core.ShapedArray((), jnp.dtype(jnp.int32)))


def element(x: Value, index: Index, axis: int = 0) -> Value:
    """`x[index]` along an axis, for an index that is known to be in range.

    Without `allow_negative_indices=False`, JAX compares every index with zero.
    """
    x, index = _unwidened(x, index)
    return lax.dynamic_index_in_dim(
        x, index, axis, keepdims=False, allow_negative_indices=False
    )


def part(x: Value, start: Index, count: int, axis: int = 0) -> Value:
    """`x[start : start + count]` along an axis, for a part that is in range."""
    x, start = _unwidened(x, start)
    return lax.dynamic_slice_in_dim(x, start, count, axis, allow_negative_indices=False)


def _unwidened(x: Value, index: Index) -> tuple[Value, Index]:
    """Keeps XLA from converting a whole array when one slice of it is read."""
    # XLA computes with small floats in a wider type, see `is_widened`, and hoists the
    # conversion of an array that does not change out of the loop. A barrier that also
    # takes the index makes the array depend on the iteration, as far as XLA can see.
    # Then the conversion stays in the loop, and is fused with the slice.
    if not is_widened(x.dtype):
        return x, index
    return lax.optimization_barrier((x, jnp.asarray(index)))


def opaque(arrays: Arrays) -> list[Value]:
    """Hides from XLA that an array is one number repeated, as it is in `jnp.ones`.

    It is for arrays that a loop within a loop reads.
    """
    # A value of a `hijax` type is no array.
    has_axes = lambda aval: is_type(aval) and bool(aval.shape)
    # The cotangent of a mean is such an array. XLA sinks its broadcast into the outer
    # loop, and so makes the whole array in each iteration, for the inner loop to read a
    # few entries. Then the time of a step would grow with the length of the loop.
    return [
        lax.optimization_barrier(x) if has_axes(jax.typeof(x)) else x for x in arrays
    ]


def put_part(buffer: Value, x: Value, start: Index, axis: int = 0) -> Value:
    """`buffer` with the part from `start` on along an axis replaced.

    XLA does it in place if nothing else reads the buffer afterwards.
    """
    return lax.dynamic_update_slice_in_dim(
        buffer, x, start, axis, allow_negative_indices=False
    )


def store(buffer: Value, x: Value, index: Index, axis: int = 0) -> Value:
    """`buffer` with `x` at an index along an axis; in place, see `put_part`."""
    return lax.dynamic_update_index_in_dim(
        buffer, x, index, axis, allow_negative_indices=False
    )
