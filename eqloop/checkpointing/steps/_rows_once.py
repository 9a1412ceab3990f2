"""Recognises buffers whose rows are written once: slots need not hold them.

Take a buffer in the carry to which each step writes one row, such as a solver's history
`rows.at[i].set(h)` with a counter `i`. If no two steps write the same row, then before
any step a row has one of two values: that of the end, if it has been written, and
otherwise that of the start. For a row that is never written, these are the same.

    start            . . . . . .
    before step 3    A B C . . .       A, B, C as at the end; the others as at the start
    end              A B C D E F

So the initial and the final buffer, which are stored once, are enough for every step,
whichever rows it reads:

    before = where(is_written, final, initial)

The counter tells which rows have been written. With `n` rows, and a counter that has
come from `i0` to `i`, they are the rows `r` with

    (r - i0) mod n < i - i0

This is right in two cases:

- The loop is too short for the counter to come round to a row a second time. Then it
  does not matter where the counter starts. An index out of bounds is dropped, and a
  negative one may have been moved up by `n`; either way the row that is written, if one
  is, is the counter modulo `n`.
- The counter is known to start at zero or above. If indices are clamped to the buffer
  instead of dropped, then the last index must also be known to be in range.

Both the buffer and the counter are recognised in the program of the step
(`_buffers.py`): the buffer is returned as it came except for one row, and the
index of that row is the counter plus a fixed number. A buffer that is written in any
other way is an ordinary leaf, and slots hold it.

It gains: without, an equation with a delay whose history is a buffer takes 7 to 14
times the memory, and 4 times as long or more.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import along, explicit_sharding, is_symbolic
from ..._programs import as_simpler, inlined
from ..._types import Aval, Value
from ._buffers import Following, writes_rows
from ._dce import dce
from ._known_values import MOST_ROWS, Buffer, CounterIndex, Understood, known_of_leaf
from ._loop import Loop
from ._step import Step


@dataclasses.dataclass(frozen=True)
class Counter:
    """A leaf of the carry that each step adds a positive number to.

    Attributes:
        stride: The number.
        steps: How many steps there are, at most.
        start: What it is before the first step, if that is known and not negative.
    """

    stride: int
    steps: int
    start: int | None

    @property
    def span(self) -> int:
        """How far it comes until the last step."""
        return self.stride * (self.steps - 1)

    @property
    def is_by_one(self) -> bool:
        """Whether it counts every number, and is known to stay within its range."""
        is_known = self.start is not None and self.start + self.span < 2**31 - MOST_ROWS
        return self.stride == 1 and is_known


@dataclasses.dataclass(frozen=True)
class RowsOnce:
    """How the rows of a buffer are written, each of them at most once.

    Attributes:
        axis: The axis of the rows.
        counter: The leaf of the carry that counts.
        offset: The number to add to the counter for the row that a step writes.
    """

    axis: int
    counter: int
    offset: int
    note: ClassVar[str] = "{} is rebuilt from its last state"

    @property
    def arrays(self) -> int:
        """How many arrays the buffer is made from, besides the counter."""
        return 3

    @property
    def firsts(self) -> frozenset[int]:
        """The integers of the initial carry that it is made from."""
        return frozenset([self.counter])

    def before(self, final: Value, initial: Value, first: Value, count: Value) -> Value:
        """The buffer before a step.

        `first` is the counter before the first step, and `count` the one before this.
        """
        rows, shape = initial.shape[self.axis], [1] * initial.ndim
        shape[self.axis] = rows
        # The differences below may be negative, which unsigned counters have no numbers
        # for.
        signed = jnp.dtype(f"int{8 * first.dtype.itemsize}")
        first, count = first.astype(signed), count.astype(signed)
        row = lax.broadcasted_iota(signed, shape, self.axis)
        # `%` of JAX, as that of Python, is not negative. The formula of this file, with
        # `i0 = first + offset`; the difference of the counters is the same without it.
        is_written = (row - (first + self.offset)) % rows < count - first
        if explicit_sharding(final) is not None:
            is_written = along(is_written, range(final.ndim), final)
        return jnp.where(is_written, final, initial)


@functools.lru_cache(maxsize=256)
def rows_once(step: Step, loop: Loop) -> tuple[RowsOnce | None, ...]:
    """For each leaf of the carry, how its rows are written if they are written once.

    The step has no outputs, and the loop has the `starts` of the carry.
    """
    count = step.num_carry
    is_unknown = step.inverse is not None or is_symbolic(loop.length)
    if is_unknown or not writes_rows(step.jaxpr):
        return (None,) * count
    # Twice through the program: first to find the counters, then the buffers, as it
    # takes the ranges of counters to follow the indices of writes.
    counters = counters_of(step, loop)
    after = carry_after(program_to_follow(step), step, counters)
    pairs = zip(step.carry_types, after, strict=True)
    return tuple(_rows_of(i, *pair, counters) for i, pair in enumerate(pairs))


def counters_of(step: Step, loop: Loop) -> dict[int, Counter]:
    """The leaves of the carry that each step adds the same positive number to."""
    starts = loop.padded_starts(step.num_carry)
    return _counters(counter_strides(step), loop, starts)


@functools.lru_cache(maxsize=256)
def program_to_follow(step: Step) -> jex.ClosedJaxpr:
    """The program of a step, without what no output needs, and without calls."""
    program = dce(step.jaxpr, (True,) * len(step.jaxpr.out_avals))
    return inlined(program, others=as_simpler)


@functools.lru_cache(maxsize=256)
def counter_strides(step: Step) -> tuple[int | None, ...]:
    """The number that a step adds to each leaf of the carry, if it does so always."""
    return tuple(
        min(out.offsets)
        if isinstance(out, CounterIndex) and out.leaf == i and len(out.offsets) == 1
        else None
        for i, out in enumerate(carry_after(program_to_follow(step), step, {}))
    )


def carry_after(
    program: jex.ClosedJaxpr, step: Step, counters: dict[int, Counter]
) -> list[Understood]:
    """What is known of the carry after a step, given which leaves of it count.

    `program` is that of the step, or another one of the same meaning.
    """
    starts = {i: c.start for i, c in counters.items() if c.start is not None}
    return followed(program, step, Following(starts))


def followed(
    program: jex.ClosedJaxpr, step: Step, following: Following
) -> list[Understood]:
    """What is found of the carry after a step."""
    known = [known_of_leaf(i, aval) for i, aval in enumerate(step.carry_types)]
    inputs = [*[None] * step.num_consts, *known, *[None] * len(step.x_types)]
    return following.outputs(program, inputs)[: step.num_carry]


def _counters(
    strides: Sequence[int | None], loop: Loop, starts: Sequence[int | None]
) -> dict[int, Counter]:
    """The leaves of the carry that each step adds the same positive number to.

    `starts` has what leaves are known to start from.
    """
    found: dict[int, Counter] = {}
    for i, (stride, start) in enumerate(zip(strides, starts, strict=True)):
        # The formula of this file takes the counter to have come up from its start.
        if stride is not None and stride > 0:
            within = start is not None and 0 <= start < MOST_ROWS
            # The positions of a loop have 32 bits: it has no more steps than that.
            within = within and stride * (loop.length - 1) < 2**31
            found[i] = Counter(stride, loop.length, start if within else None)
    return found


def _rows_of(
    leaf: int, aval: Aval, after: Understood, counters: dict[int, Counter]
) -> RowsOnce | None:
    """How the rows of a leaf are written, if this is understood.

    `after` is what is known of it after a step.
    """
    if not isinstance(after, Buffer) or after.leaf != leaf or not after.blocks:
        return None
    # Symbolic sizes cannot be compared, and empty arrays have no rows.
    if any(is_symbolic(size) or not size for size in aval.shape):
        return None
    # An axis along which all writes start at the same counter. The offsets may differ:
    # a step may choose between a few writes.
    for axis, rows in enumerate(aval.shape):
        places = {block.starts[axis] for block in after.blocks}
        indices = [
            p for p in places if isinstance(p, CounterIndex) and p.leaf in counters
        ]
        if len(indices) < len(places) or len({p.leaf for p in indices}) != 1:
            continue
        offsets = frozenset[int]().union(*(p.offsets for p in indices))
        counter, offset = indices[0].leaf, min(offsets)
        # A step may choose among its writes as it runs, so the largest block counts.
        height = max(block.sizes[axis] for block in after.blocks)
        is_clamped = any(block.is_clamped for block in after.blocks)
        written = rows, height, offsets, is_clamped
        if _is_once(counters[counter], *written):
            return RowsOnce(axis, counter, offset)
    return None


def _is_once(
    counter: Counter, rows: int, height: int, offsets: frozenset[int], is_clamped: bool
) -> bool:
    """Whether each row of a buffer is written at most once.

    A step writes up to `height` of them, from the counter plus one of `offsets` on.
    """
    # Blocks of more rows than the counter advances would overlap.
    if rows >= MOST_ROWS or height > counter.stride:
        return False
    if counter.start is not None and len(offsets) == 1:
        (offset,) = offsets
        first = counter.start + offset
        # The end of the last block. Clamping moves no block if this one is inside.
        last = first + counter.span + height
        return first >= 0 and (not is_clamped or last <= rows)
    # It is not known where the counter starts. A negative index was moved up by `rows`,
    # so its two possible offsets differ by as much.
    same = len({offset % rows for offset in offsets}) == 1
    comes_round = counter.span + height > rows
    return same and not comes_round and not is_clamped
