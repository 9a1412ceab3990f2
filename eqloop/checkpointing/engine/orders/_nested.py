"""Nested levels of segments: static trip counts throughout, which suits accelerators.

Which levels there are is worked out in `_levels.py`, by integers alone.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays
from ...._calls import format_bytes
from ...._types import Index, Value
from .._costs import AbstractPace, StepCost
from .._sweep import Cotangents, Sweep
from ..reversals._block_reversals import AbstractReversal
from ..slots._slots import Carries, DeviceSlots, StoredSteps
from ._levels import Nest
from ._order import AbstractSlotOrder, Event, block_history

# Levels that are compiled as they are to find out what memory they take. Each makes the
# program longer.
_DEEPEST = 4


@dataclasses.dataclass(frozen=True)
class Nested(AbstractSlotOrder):
    """Nests one after the other, in the order of their steps.

    Attributes:
        nests: The nests.
        with_products: For how many of them, the last ones, the primal stores the
            products of each step. These steps are run again without multiplying.
    """

    nests: tuple[Nest, ...]
    with_products: int = 0

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
        before = most = 0
        for nest in self.nests:
            most = max(most, before + nest.slots)
            before += nest.levels[0]
        return most

    @property
    def advances(self) -> int:
        return sum(nest.advances for nest in self.nests)

    @property
    def block_sizes(self) -> Sequence[int]:
        return [nest.block for nest in self.nests]

    @property
    def adjacent(self) -> int:
        return max(n.levels[-1] if n.block == 1 else n.block for n in self.nests)

    @property
    def steps_with_products(self) -> int:
        return sum(
            nest.length for nest in self.nests[len(self.nests) - self.with_products :]
        )

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return tuple(nest.levels for nest in self.nests)

    @property
    def is_flat(self) -> bool:
        return all(len(nest.levels) == 1 for nest in self.nests)

    def as_part(self) -> "Nested":
        # Those of a part are not the last steps of the loop.
        return dataclasses.replace(self, with_products=0)

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.length, self._first_slots
        first = self.length - self.steps_with_products
        for nest in reversed(self.nests):
            position, row = position - nest.length, row - nest.levels[0]
            if position < first:
                sweep = sweep.multiplying
            cts = _reverse_level(sweep, nest, position, carries, row, cts)
        return cts

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        # XLA does away with what is never read: where no step is run again but to be
        # reversed, that is what the reversal of a step does not need of its carry.
        last = cost.read if self.block == 1 else cost.held
        inner = (
            sum(nest.levels[1:-1]) * cost.held + nest.levels[-1] * last
            for nest in self.nests
            if len(nest.levels) > 1
        )
        of_primal = self._first_slots + 1 if first else 0
        # Nests are reversed one after the other, in the same memory.
        each = last if self.is_flat else cost.held
        products = self.steps_with_products * cost.known
        return of_primal * each + max(inner, default=0) + products

    def reversed_in(self, pace: AbstractPace, reversal: AbstractReversal) -> float:
        if (known := pace.of_known) is None:
            return sum(_nest_time(pace, nest, reversal) for nest in self.nests)
        first = len(self.nests) - self.with_products
        total = 0.0
        for nest in self.nests[:first]:
            own = known if _keeps_products(nest, reversal) else pace
            total += _nest_time(own, nest, reversal)
        for nest in self.nests[first:]:
            # The primal writes the products, and advances are counted as if they
            # multiplied.
            written = 2 * nest.length * pace.cost.known * pace.rate.byte
            saved = nest.advances * (pace.advance - known.advance)
            total += _nest_time(known, nest, reversal) + written - saved
        return total

    def asks_for_products(self, reversal: AbstractReversal) -> bool:
        keeps = (_keeps_products(nest, reversal) for nest in self.nests)
        return self.with_products > 0 or any(keeps)

    def duration(self, pace: AbstractPace, reversal: AbstractReversal) -> float:
        # XLA has been seen to make half as good a program of a step that is in it
        # twice, but not of batches.
        worse = 1 + 0.1 * (len(self.nests) - 1) * (reversal.batch(1) == 1)
        return super().duration(pace, reversal) * worse

    @property
    def kind(self) -> Hashable:
        depth = min(max(len(nest.levels) for nest in self.nests), 3)
        return "nested", self.block == 1, depth, self.with_products > 0

    def stand_in(self, leaves: int) -> tuple["Nested", int]:
        nests = tuple(_with_few_levels(nest) for nest in self.nests)
        deeper = sum(
            len(nest.levels) - len(small.levels)
            for nest, small in zip(self.nests, nests, strict=True)
        )
        # Each level has counters of its own, and a few values that move between loops:
        # with 50 leaves up to 9 kB were seen, with two leaves 1 kB.
        return Nested(nests, self.with_products), deeper * (1024 + 176 * leaves)

    # How it is shown.

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        rows = super().described(cost)
        if self.with_products:
            steps, each = self.steps_with_products, format_bytes(cost.known)
            rows.append(("stored products", f"of {steps} steps, {each} each"))
        return rows

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        start += self.length
        for nest in reversed(self.nests):
            start -= nest.length
            yield from _level_history(nest, start, slots)
            slots -= nest.levels[0]

    @property
    def _first_slots(self) -> int:
        """How many carries the primal stores."""
        return sum(nest.levels[0] for nest in self.nests)


def _reverse_level(
    sweep: Sweep,
    nest: Nest,
    start: Index,
    carries: Carries,
    row: int,
    cts: Cotangents,
) -> Cotangents:
    """Reverses a nest whose outermost carries are stored from a row on."""
    count, (most, *inner) = _count(nest, start, sweep.count), nest.levels
    if nest.stride == 1:
        steps = StoredSteps(carries, row, start, count, most)
        return sweep.reversal.each(sweep, steps, cts)

    def body(i: Index, cts: Cotangents) -> Cotangents:
        segment = count - 1 - i
        position = start + segment * nest.stride
        carry = carries.read(row + segment)
        if not inner:
            return sweep.pull(carry, position, nest.block, cts)
        within, slots = Nest(tuple(inner), nest.block), carries.slots.near
        if within.stride == 1:
            ran, most = _count(within, position, sweep.count), within.length
            return sweep.reversal.rerun(sweep, slots, carry, position, ran, most, cts)
        filled = _fill_nest(sweep, slots, carry, position, within)
        return _reverse_level(sweep, within, position, filled, 0, cts)

    unroll = 1 if inner else min(sweep.loop.unroll, most)
    return lax.fori_loop(0, count, body, cts, unroll=unroll)


def _fill_nest(
    sweep: Sweep, slots: DeviceSlots, carry: Arrays, start: Index, nest: Nest
) -> Carries:
    """The carries at the start of each outermost segment of a nest.

    The segments have several steps each.
    """
    stride, count = nest.stride, _count(nest, start, sweep.count)
    move = lambda i, carry: sweep.advance(carry, start + i * stride, stride)
    return slots.filled(carry, nest.levels[0]).run_on(carry, count, move)


def _count(nest: Nest, start: Index, stop: Value) -> Index:
    """How many of the outermost segments of a nest have steps that were run."""
    count = nest.levels[0]
    if stop is None:
        return count
    left = stop - jnp.asarray(start, stop.dtype) + (nest.stride - 1)
    return jnp.clip(lax.div(left, jnp.asarray(nest.stride, left.dtype)), 0, count)


def _nest_time(pace: AbstractPace, nest: Nest, reversal: AbstractReversal) -> float:
    """What the blocks of a nest take, and the loops around them."""
    total, segments = 0.0, 1
    for count in nest.levels:
        # A loop is entered, its slots are made, and every segment starts with one.
        total += segments * (3 * pace.rate.iteration + count * pace.slot)
        segments *= count
    return total + segments * pace.block(reversal, nest.block)


def _keeps_products(nest: Nest, reversal: AbstractReversal) -> bool:
    """Whether what is run again of a nest is one batch, which keeps its products."""
    *outer, last = nest.levels
    return bool(outer) and nest.block == 1 and 1 < last <= reversal.batch(1)


def _with_few_levels(nest: Nest) -> Nest:
    """Fewer levels with as many slots: those between hold the same leaves."""
    if len(nest.levels) <= _DEEPEST:
        return nest
    first, *between, last = nest.levels
    kept = _DEEPEST - 3
    return Nest((first, *between[:kept], sum(between[kept:]), last), nest.block)


def _level_history(nest: Nest, start: int, slots: int) -> Iterator[Event]:
    """Reverses a nest whose outermost carries are the last of the slots."""
    count, *inner = nest.levels
    for segment in reversed(range(count)):
        position = start + segment * nest.stride
        if not inner:
            yield from block_history(position, nest.block, slots)
        else:
            within = Nest(tuple(inner), nest.block)
            # All but the last segment are run for the carry that comes after.
            for offset in range(within.length - within.stride):
                filled = 1 + offset // within.stride
                yield Event("again", position + offset, slots + filled)
            yield from _level_history(within, position, slots + inner[0])
        slots -= 1
