"""Nested levels of segments, all of them with static trip counts.

On a GPU, a loop whose trip count is not static waits for the host in each iteration.
How a loop is cut into levels is worked out in `_levels.py`.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays
from ...._types import Index, Value
from .._costs import StepCost
from .._pace import SIDE_BY_SIDE, Pace, Piece
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries, DeviceSlots
from ..slots._stored_steps import StepsToRun, StoredSteps
from ._levels import Nest
from ._order import AbstractSlotOrder, Event, block_history

# The most levels of a nest that is compiled to find out its memory. Each level makes
# the program longer.
_DEEPEST = 4


@dataclasses.dataclass(frozen=True)
class Nested(AbstractSlotOrder):
    """Consecutive nests.

    Attributes:
        nests: The nests, in the order of their steps.
    """

    nests: tuple[Nest, ...]

    @property
    def length(self) -> int:
        return sum(nest.length for nest in self.nests)

    @property
    def starts(self) -> Sequence[int]:
        result, start = list[int](), 0
        for nest in self.nests:
            result += range(start, start + nest.length, nest.stride)
            start += nest.length
        return result

    @property
    def slots(self) -> int:
        # While a nest is reversed, the carries that the primal has stored for the nests
        # before it are still there, and those for the nests after it are not needed.
        before = most = 0
        for nest in self.nests:
            most = max(most, before + nest.slots)
            before += nest.levels[0]
        return most

    @property
    def primal_slots(self) -> int:
        # Without the list of where they are, which takes long for many layouts.
        return sum(nest.levels[0] for nest in self.nests)

    @property
    def advances(self) -> int:
        return sum(nest.advances for nest in self.nests)

    @property
    def block_sizes(self) -> Sequence[int]:
        return [nest.block for nest in self.nests]

    @property
    def adjacent(self) -> int:
        return max(n.at_once if n.block == 1 else n.block for n in self.nests)

    @property
    def side_by_side(self) -> int:
        return max(nest.side_by_side for nest in self.nests)

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return tuple(nest.levels for nest in self.nests)

    @property
    def is_flat(self) -> bool:
        return all(len(nest.levels) == 1 for nest in self.nests)

    @property
    def needs_spare(self) -> bool:
        return False

    @property
    def most_groups(self) -> int:
        # All nests that there are. The way back has the step once for each as well.
        return len(self.nests)

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.length, self.primal_slots
        for nest in reversed(self.nests):
            # A loop of Python: nests are few, and no two need have the same levels.
            position, row = position - nest.length, row - nest.levels[0]
            cts = _reverse_level(sweep, nest, position, carries, row, cts)
        return cts

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        # A leaf that is held only to compute later carries is not needed where no later
        # carry is computed, as on the last level with blocks of one step. XLA sees that
        # it is never read, and removes its slots.
        last = cost.read if self.block == 1 else cost.held
        inner = (
            sum(nest.levels[1:-1]) * cost.held
            + nest.at_once * last
            + _bytes_side_by_side(nest, cost)
            for nest in self.nests
            if len(nest.levels) > 1
        )
        of_primal = self.primal_slots + 1 if first else 0
        # XLA gives the inner slots of all nests the same memory, as nests are reversed
        # one after the other.
        each = last if self.is_flat else cost.held
        return of_primal * each + max(inner, default=0)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        known = pace.of_known
        paces = [known if _keeps_products(n, reversal) else pace for n in self.nests]
        pairs = zip(paces, self.nests, strict=True)
        return sum(_nest_time(own, nest, reversal) for own, nest in pairs)

    def pieces(self, reversal: AbstractReversal) -> frozenset[Piece]:
        side_by_side = {SIDE_BY_SIDE} if self.side_by_side > 1 else set()
        return super().pieces(reversal) | side_by_side

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        # A program that has the step twice has been seen to be slower by up to half,
        # but not if the steps are reversed in batches.
        worse = 1 + 0.1 * (len(self.nests) - 1) * (reversal.batch(1) == 1)
        saved = sum(
            nest.advances_side_by_side
            * (pace.advance - pace.advance_side_by_side(nest.side_by_side))
            for nest in self.nests
        )
        return (super().duration(pace, reversal) - saved) * worse

    @property
    def kind(self) -> Hashable:
        depth = min(max(len(nest.levels) for nest in self.nests), 3)
        return "nested", self.block == 1, depth, self.side_by_side > 1

    def stand_in(self, leaves: int) -> tuple["Nested", int]:
        nests = tuple(_with_few_levels(nest) for nest in self.nests)
        # How many levels were left out in all.
        deeper = sum(
            len(nest.levels) - len(small.levels)
            for nest, small in zip(self.nests, nests, strict=True)
        )
        # Each level has counters of its own, and a few values that move between loops.
        # Up to 9 kB were seen with 50 leaves, and 1 kB with two leaves.
        return Nested(nests), deeper * (1024 + 176 * leaves)

    # How it is shown.

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        rows = super().described(cost)
        if self.side_by_side > 1:
            rows.append(("run again side by side", f"{self.side_by_side} segments"))
        return rows

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        start += self.length
        for nest in reversed(self.nests):
            start -= nest.length
            yield from _level_history(nest, start, slots)
            slots -= nest.levels[0]


def _reverse_level(
    sweep: Sweep,
    nest: Nest,
    start: Index,
    carries: Carries,
    row: int,
    cts: Cotangents,
) -> Cotangents:
    """Reverses a nest.

    Args:
        sweep: The way back.
        nest: The nest.
        start: The position of its first step.
        carries: Slots, which hold the carries at its outermost segments.
        row: The row of the first of these carries.
        cts: The cotangents after the nest.
    """
    # This recursion is traced. The program is as deep as there are levels, which does
    # not depend on how many segments they have.
    count, (most, *inner) = _count(nest, start, sweep.count), nest.levels
    # Carries of single steps in adjacent rows: the reversal may take them together.
    if nest.stride == 1:
        steps = StoredSteps(carries, row, start, count, most)
        return sweep.reversal.each(sweep, steps, cts)

    if _runs_side_by_side(nest) and sweep.joins_steps:
        return _reverse_side_by_side(sweep, nest, start, carries, row, cts)

    def body(i: Index, cts: Cotangents) -> Cotangents:
        segment = count - 1 - i
        position = start + segment * nest.stride
        carry = carries.read(row + segment)
        if not inner:
            return sweep.pull(carry, position, nest.block, cts)
        within, slots = nest.within, carries.slots.near
        # The reversal has the segments of the last level run again, as it may keep more
        # of their steps than the carries.
        if within.stride == 1:
            ran = _count(within, position, sweep.count)
            steps = StepsToRun(slots, position, carry, ran, within.length)
            return sweep.reversal.rerun(sweep, steps, cts)
        # Otherwise store the carries of the next level, and reverse that from them.
        filled = _fill_nest(sweep, slots, carry, position, within)
        return _reverse_level(sweep, within, position, filled, 0, cts)

    # Outer loops are not unrolled: that would repeat the loops within them.
    unroll = 1 if inner else min(sweep.loop.unroll, most)
    return lax.fori_loop(0, count, body, cts, unroll=unroll)


def _reverse_side_by_side(
    sweep: Sweep, nest: Nest, start: Index, carries: Carries, row: int, cts: Cotangents
) -> Cotangents:
    """The same for a nest of two levels, whose segments are run again side by side."""
    (count, each), slots = nest.levels, carries.slots.near
    groups, left = divmod(count, nest.side_by_side)

    def reverse(first: Index, size: int, cts: Cotangents) -> Cotangents:
        firsts = carries.read_part(row + first, size)
        position = start + first * each
        steps = StepsToRun(slots, position, firsts, each, each, size)
        return sweep.reversal.rerun(sweep, steps, cts)

    # What is left over are the first segments.
    of_group = lambda i, cts: reverse(
        count - (i + 1) * nest.side_by_side, nest.side_by_side, cts
    )
    cts = lax.fori_loop(0, groups, of_group, cts)
    return reverse(0, left, cts) if left else cts


def _fill_nest(
    sweep: Sweep, slots: DeviceSlots, carry: Arrays, start: Index, nest: Nest
) -> Carries:
    """Runs a nest again to store the carries at its outermost segments.

    These have several steps each. The last of them is not run.
    """
    stride, count = nest.stride, _count(nest, start, sweep.count)
    move = lambda i, carry: sweep.advance(carry, start + i * stride, stride)
    # Slots of the primal have one more row. Here, no carry goes there.
    return slots.filled(carry, nest.levels[0]).run_on(carry, count, move)


def _count(nest: Nest, start: Index, stop: Value) -> Index:
    """How many of the outermost segments of a nest have steps that were run.

    Args:
        nest: The nest.
        start: The position of its first step.
        stop: How many steps of the loop were run, if not all; see `Sweep.count`.
    """
    count = nest.levels[0]
    if stop is None:
        return count
    # `ceil((stop - start) / stride)`. Unlike `//`, `div` rounds towards zero, which
    # saves the correction of a negative quotient: that is clipped anyway.
    left = stop - jnp.asarray(start, stop.dtype) + (nest.stride - 1)
    return jnp.clip(lax.div(left, jnp.asarray(nest.stride, left.dtype)), 0, count)


def _nest_time(pace: Pace, nest: Nest, reversal: AbstractReversal) -> float:
    """How long the blocks of a nest take, and the loops around them."""
    total, segments = 0.0, 1
    for count in nest.levels:
        # For each loop: entering it, making its slots, and reading one per segment.
        total += segments * (3 * pace.rate.iteration + count * pace.slot)
        segments *= count
    return total + segments * pace.block(reversal, nest.block)


def _keeps_products(nest: Nest, reversal: AbstractReversal) -> bool:
    """Whether the steps of the last level are one batch, which keeps its products.

    See `Together.rerun`, which keeps them for a single batch only.
    """
    is_run_again = len(nest.levels) > 1 and nest.block == 1
    return is_run_again and 1 < nest.at_once <= reversal.batch(1)


def _with_few_levels(nest: Nest) -> Nest:
    """A nest of fewer levels with as many slots, for the same memory.

    The first level is stored by the primal, and slots of the last one may lack leaves.
    Those in between are all alike, so they are put together.
    """
    if len(nest.levels) <= _DEEPEST:
        return nest
    first, *between, last = nest.levels
    kept = _DEEPEST - 3
    levels = (first, *between[:kept], sum(between[kept:]), last)
    return dataclasses.replace(nest, levels=levels)


def _level_history(nest: Nest, start: int, slots: int) -> Iterator[Event]:
    """The events of the reversal of a nest, whose outermost carries are stored."""
    count, *inner = nest.levels
    if _runs_side_by_side(nest):
        yield from _history_side_by_side(nest, start, slots)
        return
    for segment in reversed(range(count)):
        position = start + segment * nest.stride
        if not inner:
            yield from block_history(position, nest.block, slots)
        else:
            within = nest.within
            # Every segment but the last is run, for the carry after it.
            for offset in range(within.length - within.stride):
                filled = 1 + offset // within.stride
                yield Event("again", position + offset, slots + filled)
            yield from _level_history(within, position, slots + inner[0])
        slots -= 1


def _history_side_by_side(nest: Nest, start: int, slots: int) -> Iterator[Event]:
    """The same if segments of single steps are run again side by side."""
    count, each = nest.levels
    while count:
        size = nest.side_by_side if count >= nest.side_by_side else count
        count -= size
        # The first carry of each segment is copied before any step is run.
        position, filled = start + count * each, slots + size
        for offset in range(each - 1):
            for segment in range(size):
                filled += 1
                yield Event("again", position + segment * each + offset, filled)
        yield from _level_history(Nest((size * each,)), position, filled)
        slots -= size


def _bytes_side_by_side(nest: Nest, cost: StepCost) -> int:
    """The bytes that segments take while they are run again side by side.

    Each has a carry that it has reached, and reads its part of `xs`, which is copied.
    """
    if nest.side_by_side == 1:
        return 0
    return nest.side_by_side * (cost.carry + nest.levels[-1] * cost.x)


def _runs_side_by_side(nest: Nest) -> bool:
    """Whether its segments are run again side by side, if the sweep allows it."""
    return nest.side_by_side > 1 and len(nest.levels) == 2 and nest.block == 1
