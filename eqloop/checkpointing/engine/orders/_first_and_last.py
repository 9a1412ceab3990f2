"""The first steps by one order, and the last ones by another.

What is stored of the last steps is needed first, and then its room is free for the way
back through the others. So the last steps may store all of their residuals, as far as
there is room, and are not run again.

It saves time: without it, a stack of 24 layers in 95 % of the memory that it takes to
store everything evaluates each layer twice, and with it all but two of them once.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

from ...._arrays import Arrays, Flags
from ...._calls import format_bytes
from ...._types import PyTree
from .._costs import StepCost
from .._loop import Loop
from .._pace import Pace, Piece
from .._step import Step
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries
from ._order import AbstractOrder, AbstractSlotOrder, Event


@dataclasses.dataclass(frozen=True)
class FirstAndLast(AbstractSlotOrder):
    """Two orders, one after the other, for both of which the primal stores.

    Attributes:
        first: The order of the first steps.
        last: The order of the last ones. If it stores residuals, the primal has them.
    """

    first: AbstractSlotOrder
    last: AbstractOrder

    @property
    def length(self) -> int:
        return self.first.length + self.last.length

    @property
    def starts(self) -> Sequence[int]:
        last = self.last.of_carries
        behind = last.starts if last else ()
        return [*self.first.starts, *(self.first.length + at for at in behind)]

    @property
    def primal_slots(self) -> int:
        last = self.last.of_carries
        return self.first.primal_slots + (last.primal_slots if last else 0)

    @property
    def moves(self) -> float:
        last = self.last.of_carries
        return self.first.moves + (last.moves if last else 0)

    @property
    def slots(self) -> int:
        # While the last steps are reversed, the carries for the first are there.
        return max(self.first.slots, self.first.primal_slots + self.last.slots)

    @property
    def advances(self) -> int:
        last = self.last.of_carries
        return self.first.advances + (last.advances if last else 0)

    @property
    def evaluations(self) -> int:
        return self.first.evaluations + self.last.evaluations

    @property
    def block_sizes(self) -> Sequence[int]:
        last = self.last.of_carries
        return [*self.first.block_sizes, *(last.block_sizes if last else ())]

    @property
    def adjacent(self) -> int:
        return max(self.first.adjacent, self.last.adjacent)

    @property
    def steps_with_residuals(self) -> int:
        return self.last.length if self.last.stores_residuals else 0

    @property
    def undone(self) -> int:
        return self.first.undone

    @property
    def side_by_side(self) -> int:
        return max(self.first.side_by_side, self.last.side_by_side)

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return (*self.first.levels, *self.last.levels)

    @property
    def keeps_last(self) -> bool:
        return (self.last.of_carries or self.first).keeps_last

    @property
    def is_flat(self) -> bool:
        last = self.last.of_carries
        return self.first.is_flat and (last is None or last.is_flat)

    def by_carries(self) -> "FirstAndLast":
        return dataclasses.replace(self, last=self.last.by_carries())

    def as_part(self) -> "FirstAndLast":
        return FirstAndLast(self.first.as_part(), self.last.as_part())

    def only_carries(self) -> AbstractSlotOrder:
        return self if self.last.of_carries else self.first.only_carries()

    # How it is run.

    def checked(
        self, step: Step, loop: Loop, held: Flags, inputs: PyTree
    ) -> tuple[Arrays, Arrays, Arrays]:
        return self.first.checked(step, loop, held, inputs)

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        first, last = self.first, self.last.of_carries
        if last is None:
            cts = sweep.pull_stored(cts)
        else:
            behind = carries.from_row(first.primal_slots)
            cts = last.reverse(sweep.part(first.length), behind, cts)
        return first.reverse(sweep, carries, cts)

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        last = self.last.of_carries
        if last is None:
            more = (self.saved_rows - self.first.saved_rows) * cost.saved * first
            return self.first.slot_bytes(cost, first) + more
        of_primal = self.bytes_of_primal(cost) if first else 0
        inner = self.first.slot_bytes(cost, False), last.slot_bytes(cost, False)
        return of_primal + max(inner)

    def stored_bytes(
        self, cost: StepCost, reversal: AbstractReversal, first: bool
    ) -> int:
        # The residuals are gone when the slots of inner levels and blocks are in use.
        inner = self.slot_bytes(cost, False) + self.bytes_of_blocks(cost, reversal)
        of_primal = self.slot_bytes(cost, first) - self.slot_bytes(cost, False)
        return of_primal + max(inner, self.steps_with_residuals * cost.residuals)

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        first = self.first.duration(pace, reversal)
        return first + self.last.duration(pace, reversal)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        last = self.last.of_carries
        of_last = last.reversed_in(pace, reversal) if last else 0.0
        return self.first.reversed_in(pace, reversal) + of_last

    def pieces(self, reversal: AbstractReversal) -> frozenset[Piece]:
        return self.first.pieces(reversal) | self.last.pieces(reversal)

    @property
    def kind(self) -> Hashable:
        return "first and last", self.first.kind, self.last.kind

    def stand_in(self, leaves: int) -> tuple["FirstAndLast", int]:
        first, more = self.first.stand_in(leaves)
        return dataclasses.replace(self, first=first), more

    # How it is shown.

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        steps, each = self.steps_with_residuals, format_bytes(cost.residuals)
        if not steps:
            return super().described(cost)
        text = f"the last {steps} of {self.length} steps store everything, {each} each"
        return [*self.first.described(cost), ("residuals", text)]

    def history(self) -> Iterator[Event]:
        first, steps = self.first.length, self.steps_with_residuals
        for event in super().history():
            # The primal has come to the steps whose residuals it stores.
            if event.kind == "primal" and steps:
                stored = max(event.position + 1 - first, 0)
                event = event._replace(residuals=stored)
            yield event

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        middle, last = start + self.first.length, self.last.of_carries
        if last is None:
            for offset in reversed(range(self.last.length)):
                yield Event("reversal", middle + offset, slots, offset + 1)
        else:
            yield from last.reversal_history(middle, slots)
            slots -= last.primal_slots
        yield from self.first.reversal_history(start, slots)

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        if event.position < self.first.length:
            return self.first.event_bytes(cost, event)
        carries = event.slots * cost.held + self.saved_bytes(cost, event)
        return carries + event.residuals * cost.residuals
