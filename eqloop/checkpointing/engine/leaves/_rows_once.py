"""Buffers whose rows are written once: slots need not hold them.

Take a buffer of the carry to which each step writes one row, as a solver's history
`rows.at[i].set(h)` with a counter `i`, and nothing else. If no two steps write the same
row, then before any step a row is one of two: what it is at the end, if it has been
written already, and what it was at the start, if not. For a row that is never written
both are the same. So the initial and the final buffer, which are there once, serve all
reads of all steps, wherever these read:

    before = where(written, final, initial)

The counter tells what has been written. With `n` rows, and writes from row `i0` on by a
counter that has come from `i0` to `i`, these are the rows `r` with

    (r - i0) mod n < i - i0

That is right in two cases.

- The loop is too short for a counter to come round. Indices that are out of bounds are
  dropped, and negative ones may have been moved up by `n`; either way the row that is
  written, if one is, is the counter modulo `n`. Where it starts does not matter.
- It is known where the counter starts, at zero or above. If indices are clamped to the
  buffer, it must be known that the last one is within, too.

All is read off the program of the step (`_written_rows.py`): that the buffer comes out
as it came in but for one row, and that the row is a counter plus a fixed number. What
is not understood is no such buffer, and slots hold it.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from ...._arrays import along, explicit_sharding, is_symbolic
from ...._types import Aval, Value
from .._in_place import writes_rows
from .._loop import Loop
from .._step import Step
from ._lean_loops import lean
from ._written_rows import (
    MOST_ROWS,
    Counter,
    CounterIndex,
    Reading,
    Understood,
    WrittenBuffer,
    known_of_leaf,
)


@dataclasses.dataclass(frozen=True)
class RowsOnce:
    """How the rows of a buffer are written, each of them at most once.

    Attributes:
        axis: The axis of the rows.
        counter: The leaf of the carry that counts.
        offset: How many rows behind the counter the row of a step is.
    """

    axis: int
    counter: int
    offset: int

    def before(self, final: Value, initial: Value, first: Value, count: Value) -> Value:
        """The buffer before a step.

        Args:
            final: The buffer after the last step.
            initial: The buffer before the first one.
            first: The counter before the first one.
            count: The counter before this one.
        """
        rows, shape = initial.shape[self.axis], [1] * initial.ndim
        shape[self.axis] = rows
        signed = jnp.dtype(f"int{8 * first.dtype.itemsize}")
        first, count = first.astype(signed), count.astype(signed)
        row = lax.broadcasted_iota(signed, shape, self.axis)
        is_written = (row - (first + self.offset)) % rows < count - first
        if explicit_sharding(final) is not None:
            is_written = along(is_written, range(final.ndim), final)
        return jnp.where(is_written, final, initial)


@functools.lru_cache(maxsize=256)
def rows_once(step: Step, loop: Loop) -> tuple[RowsOnce | None, ...]:
    """The leaves of the carry that are such buffers.

    Args:
        step: The step, without outputs.
        loop: The loop, with the `starts` of the carry of this step.
    """
    count = step.num_carry
    is_unknown = step.inverse is not None or is_symbolic(loop.length)
    if is_unknown or not writes_rows(step.jaxpr):
        return (None,) * count
    counters = _counters(counter_strides(step), loop, loop.padded_starts(count))
    pairs = zip(step.carry_types, _carry_after(step, counters), strict=True)
    return tuple(_rows_of(i, *pair, counters) for i, pair in enumerate(pairs))


@functools.lru_cache(maxsize=256)
def counter_strides(step: Step) -> tuple[int | None, ...]:
    """The number that a step adds to each leaf of the carry, if it does so always."""
    return tuple(
        min(out.offsets)
        if isinstance(out, CounterIndex) and out.leaf == i and len(out.offsets) == 1
        else None
        for i, out in enumerate(_carry_after(step, {}))
    )


def _carry_after(step: Step, counters: dict[int, Counter]) -> list[Understood]:
    """What is known of the carry after a step, given which leaves of it count."""
    program = lean(step.jaxpr, (True,) * len(step.jaxpr.out_avals))
    known = [known_of_leaf(i, aval) for i, aval in enumerate(step.carry_types)]
    inputs = [*[None] * step.num_consts, *known, *[None] * len(step.x_types)]
    return Reading(counters).outputs(program, inputs)[: step.num_carry]


def _counters(
    strides: Sequence[int | None], loop: Loop, starts: Sequence[int | None]
) -> dict[int, Counter]:
    """The leaves of the carry that count up, given what steps add to them."""
    found: dict[int, Counter] = {}
    for i, (stride, start) in enumerate(zip(strides, starts, strict=True)):
        if stride is not None and stride > 0:
            within = start is not None and 0 <= start < MOST_ROWS
            # The positions of a loop have 32 bits: it has no more steps than that.
            within = within and stride * (loop.length - 1) < 2**31
            found[i] = Counter(stride, loop.length, start if within else None)
    return found


def _rows_of(
    leaf: int, aval: Aval, after: Understood, counters: dict[int, Counter]
) -> RowsOnce | None:
    """How the rows of a leaf are written, given what a step makes of the carry."""
    if not isinstance(after, WrittenBuffer) or after.leaf != leaf or not after.writes:
        return None
    for axis, rows in enumerate(aval.shape):
        places = {write.starts[axis] for write in after.writes}
        indices = [
            p for p in places if isinstance(p, CounterIndex) and p.leaf in counters
        ]
        if len(indices) < len(places) or len({p.leaf for p in indices}) != 1:
            continue
        offsets = frozenset[int]().union(*(p.offsets for p in indices))
        counter, offset = indices[0].leaf, min(offsets)
        height = max(write.sizes[axis] for write in after.writes)
        is_clamped = any(write.is_clamped for write in after.writes)
        written = rows, height, offsets, is_clamped
        if _is_once(counters[counter], *written):
            return RowsOnce(axis, counter, offset)
    return None


def _is_once(
    counter: Counter, rows: int, height: int, offsets: frozenset[int], is_clamped: bool
) -> bool:
    """Whether each row of a buffer is written at most once.

    Args:
        counter: What counts.
        rows: How many rows the buffer has.
        height: How many of them, one after the other, a step may write.
        offsets: How far behind the counter the first of them may be.
        is_clamped: Whether they are moved into the buffer.
    """
    if rows >= MOST_ROWS or height > counter.stride:
        return False
    if counter.start is not None and len(offsets) == 1:
        (offset,) = offsets
        first = counter.start + offset
        last = first + counter.span + height
        return first >= 0 and (not is_clamped or last <= rows)
    same = len({offset % rows for offset in offsets}) == 1
    comes_round = counter.span + height > rows
    return same and not comes_round and not is_clamped
