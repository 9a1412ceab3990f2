"""Consecutive segments, each of which is reversed by an order of its own.

This is what `LoopSpec.cut` makes: the order of schedules from other projects. A budget
of two places also has equal segments.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays
from ...._programs import constant
from ...._types import Index, Value
from .._costs import StepCost
from .._loop import element
from .._pace import Pace
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries, DeviceSlots
from ._order import AbstractSlotOrder, Event


@dataclasses.dataclass(frozen=True)
class Segmented(AbstractSlotOrder):
    """The primal stores the carry at the start of each segment.

    On the way back, each segment is run again from there, to store the carries that its
    own order starts from, and is then reversed by that order.

    Attributes:
        parts: For each group of equal consecutive segments, how many there are, and the
            order of one.
    """

    parts: tuple[tuple[int, AbstractSlotOrder], ...]

    @property
    def length(self) -> int:
        return sum(count * order.length for count, order in self.parts)

    @property
    def starts(self) -> Sequence[int]:
        lengths = [order.length for count, order in self.parts for _ in range(count)]
        return [0, *itertools.accumulate(lengths[:-1])]

    @property
    def slots(self) -> int:
        before = most = 0
        for count, order in self.parts:
            before += count
            most = max(most, before + order.slots)
        return most

    @property
    def advances(self) -> int:
        # To store the carries at its starts, a segment is run up to the last of them.
        each = [(n, order.starts[-1] + order.advances) for n, order in self.parts]
        return sum(count * advances for count, advances in each)

    @property
    def block_sizes(self) -> Sequence[int]:
        return [size for _, order in self.parts for size in order.block_sizes]

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.length, sum(count for count, _ in self.parts)
        for count, order in reversed(self.parts):
            # Equal segments share a loop, and so one copy of the step in the program.
            position, row = position - count * order.length, row - count
            first = carries, row
            cts = _reverse_part(sweep, count, order, position, first, cts)
        return cts

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        of_primal = (len(self.starts) + 1) * cost.held if first else 0
        return of_primal + max(order.slot_bytes(cost, True) for _, order in self.parts)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        total = 0.0
        for count, order in self.parts:
            dynamic = 0 if _stride(order) else order.starts[-1]
            total += count * (
                order.reversed_in(pace, reversal)
                + dynamic * pace.rate.dynamic_iteration
                + 3 * pace.rate.iteration
                + len(order.starts) * pace.slot
            )
        return total

    @property
    def kind(self) -> Hashable:
        return "segmented", tuple(order.kind for _, order in self.parts)

    # How it is shown.

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        position = start + self.length
        for count, order in reversed(self.parts):
            for _ in range(count):
                position -= order.length
                for offset in range(order.starts[-1]):
                    filled = sum(begin <= offset for begin in order.starts)
                    yield Event("again", position + offset, slots + filled)
                filled = slots + len(order.starts)
                yield from order.reversal_history(position, filled)
                slots -= 1


def _reverse_part(
    sweep: Sweep,
    count: int,
    order: AbstractSlotOrder,
    start: int,
    first: tuple[Carries, int],
    cts: Cotangents,
) -> Cotangents:
    """Reverses equal segments.

    Args:
        sweep: The way back.
        count: How many segments there are.
        order: The order of each.
        start: The position at which the first of them starts.
        first: The slots, and the row of the carry at `start`.
        cts: The cotangents after the last segment.
    """
    carries, row = first

    def body(i: Index, cts: Cotangents) -> Cotangents:
        segment = run - 1 - i
        # An order counts positions from the start of its own segment.
        within = sweep.part(start + segment * order.length)
        near, carry = carries.slots.near, carries.read(row + segment)
        filled = _fill_segment(within, near, order, carry)
        return order.reverse(within, filled, cts)

    run = count
    if sweep.count is not None:
        # Segments with any steps that were run: `ceil((count - start) / length)`.
        run = jnp.clip(-((start - sweep.count) // order.length), 0, count)
    return lax.fori_loop(0, run, body, cts)


def _fill_segment(
    sweep: Sweep, slots: DeviceSlots, order: AbstractSlotOrder, carry: Arrays
) -> Carries:
    """Runs a segment again to store the carries that its order starts from."""
    stride, starts = _stride(order), constant(order.starts)

    def move(i: Index, carry: list[Value]) -> list[Value]:
        # At equal distances the trip count is static, so a GPU need not wait for the
        # host.
        if stride:
            return sweep.advance(carry, i * stride, stride)
        begin, end = element(starts, i), element(starts, i + 1)
        return sweep.advance_to(carry, begin, end)

    count = run = len(order.starts)
    if sweep.count is not None:
        run = jnp.maximum(jnp.sum(starts < sweep.count), 1)
    # There is one more row, as for the primal, see `AbstractSlotOrder`.
    return slots.filled(carry, count + 1).run_on(carry, run, move)


def _stride(order: AbstractSlotOrder) -> int | None:
    """The number of steps between the starts of an order, if it is always the same."""
    gaps = {stop - start for start, stop in itertools.pairwise(order.starts)}
    return gaps.pop() if len(gaps) == 1 else None
