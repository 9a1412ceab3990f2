"""Orders that are made of others: a tree, and one way to go back through it.

    Joined         orders of consecutive parts, for all of which the primal stores
    Repeated       equal segments, each of which is run again and reversed by one order
    SingleSteps    steps with the carry of each in a slot
    StepBlock      steps whose residuals are stored together

The two nests of levels `(3, 2, 4)` and `(2, 3)`, one after the other, are

    Joined(Repeated(3, Repeated(2, SingleSteps(4))), Repeated(2, SingleSteps(3)))

Whatever an order counts or costs follows from that of its parts. A part counts
positions from its own first step, and rows from its own first carry. The recursion is
traced: the program is as deep as the tree, however long the loop is.
"""

import abc
import bisect
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Sequence

from jax import lax

from ...._arrays import Arrays, Flags
from ...._types import Index, PyTree
from ...steps._loop import Loop
from ...steps._step import Step
from .._costs import StepCost
from .._pace import Pace, Piece
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries, DeviceSlots
from ..slots._stored_steps import StepsToRun, StoredSteps
from ._order import AbstractOrder, AbstractSlotOrder, Event, block_history


@dataclasses.dataclass(frozen=True)
class AbstractLeaf(AbstractSlotOrder):
    """So many steps, with no other order in them."""

    steps: int

    @property
    def length(self) -> int:
        return self.steps

    @property
    def needs_spare(self) -> bool:
        return False

    @property
    def is_flat(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class SingleSteps(AbstractLeaf):
    """Single steps whose carries are in adjacent rows."""

    @property
    def starts(self) -> Sequence[int]:
        return range(self.steps)

    @property
    def slots(self) -> int:
        return self.steps

    @property
    def adjacent(self) -> int:
        return self.steps

    @property
    def rerun_singly(self) -> int:
        return self.steps

    @property
    def stride(self) -> int:
        return 1

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        # The reversal may take them together.
        steps = StoredSteps(carries, 0, 0, self.run_in(sweep), self.steps)
        return sweep.reversal.each(sweep, steps, cts)

    def rerun(
        self, sweep: Sweep, slots: DeviceSlots, carry: Arrays, cts: Cotangents
    ) -> Cotangents:
        # By the reversal, as it may keep more of the steps than the carries.
        steps = StepsToRun(slots, 0, carry, self.run_in(sweep), self.steps)
        return sweep.reversal.rerun(sweep, steps, cts)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        return self.steps * pace.block(reversal, 1)

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        for offset in range(self.steps):
            yield from block_history(start + self.steps - 1 - offset, 1, slots - offset)


@dataclasses.dataclass(frozen=True)
class StepBlock(AbstractLeaf):
    """Steps whose residuals are stored together, from a carry that is at hand."""

    @property
    def slots(self) -> int:
        return 0

    @property
    def block_sizes(self) -> Sequence[int]:
        return [self.steps]

    def rerun(
        self, sweep: Sweep, slots: DeviceSlots, carry: Arrays, cts: Cotangents
    ) -> Cotangents:
        return sweep.pull(carry, 0, self.steps, cts)

    def filling_time(self, pace: Pace) -> float:
        return 0.0

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        return pace.block(reversal, self.steps)

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        return block_history(start, self.steps, slots)


@dataclasses.dataclass(frozen=True)
class Repeated(AbstractSlotOrder):
    """Equal segments, whose first carries are stored.

    Attributes:
        count: How many there are.
        inner: The order of each. Its carries are stored when the segment is run again.
    """

    count: int
    inner: AbstractSlotOrder

    @property
    def length(self) -> int:
        return self.count * self.inner.length

    @property
    def starts(self) -> Sequence[int]:
        return range(0, self.length, self.inner.length)

    @property
    def slots(self) -> int:
        return self.count + self.inner.slots

    @property
    def advances(self) -> int:
        return self.count * (self.inner.last_start + self.inner.advances)

    @property
    def block_sizes(self) -> Sequence[int]:
        return self.inner.block_sizes

    @property
    def adjacent(self) -> int:
        return self.inner.adjacent

    @property
    def needs_spare(self) -> bool:
        return False

    @property
    def stride(self) -> int:
        return self.inner.length

    @property
    def is_flat(self) -> bool:
        # Blocks are reversed from carries that are there already.
        return not self.inner.primal_slots

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        slots, run = carries.slots.near, self.run_in(sweep)

        def body(i: Index, cts: Cotangents) -> Cotangents:
            segment = run - 1 - i
            within, carry = sweep.part(segment * self.stride), carries.read(segment)
            return self.inner.rerun(within, slots, carry, cts)

        # Outer loops are not unrolled: that would repeat the loops within them.
        unroll = min(sweep.loop.unroll, self.count) if self.is_flat else 1
        return lax.fori_loop(0, run, body, cts, unroll=unroll)

    # What it costs.

    def inner_bytes(self, cost: StepCost) -> int:
        inner = self.inner
        rows = inner.primal_slots + inner.needs_spare
        return rows * inner.bytes_of_slot(cost) + inner.inner_bytes(cost)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        within = pace.of_known if self._keeps_products(reversal) else pace
        inner = self.inner.reversed_in(within, reversal)
        return self.count * (self.inner.filling_time(pace) + inner)

    def _keeps_products(self, reversal: AbstractReversal) -> bool:
        """Whether the steps that are run again are one batch, see `Together.rerun`."""
        return 1 < self.inner.rerun_singly <= reversal.batch(1)

    @property
    def kind(self) -> Hashable:
        return self.inner.kind

    # How it is shown.

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        inner = self.inner
        for segment in reversed(range(self.count)):
            position = start + segment * self.stride
            for offset in range(inner.last_start):
                stored = slots + bisect.bisect_right(inner.starts, offset)
                yield Event("again", position + offset, stored)
            yield from inner.reversal_history(position, slots + inner.primal_slots)
            slots -= 1


class AbstractJoined(AbstractSlotOrder):
    """Orders of consecutive parts of a loop, for all of which the primal stores.

    The last ones are reversed first. What is stored of them is not needed then.
    """

    @property
    @abc.abstractmethod
    def orders(self) -> Sequence[AbstractOrder]:
        """The orders. If the last one stores residuals, the primal has them."""

    @functools.cached_property
    def _of_carries(self) -> list[AbstractSlotOrder]:
        return [own for order in self.orders if (own := order.of_carries)]

    @property
    def length(self) -> int:
        return sum(order.length for order in self.orders)

    @property
    def starts(self) -> Sequence[int]:
        result, start = list[int](), 0
        for order in self._of_carries:
            result += (start + at for at in order.starts)
            start += order.length
        return result

    @property
    def primal_slots(self) -> int:
        # Without the list of where they are, which takes long for many layouts.
        return sum(order.primal_slots for order in self._of_carries)

    @property
    def slots(self) -> int:
        before = most = 0
        for order in self.orders:
            most = max(most, before + order.slots)
            before += order.primal_slots
        return most

    @property
    def moves(self) -> float:
        return sum(order.moves for order in self._of_carries)

    @property
    def advances(self) -> int:
        return sum(order.advances for order in self._of_carries)

    @property
    def evaluations(self) -> int:
        return sum(order.evaluations for order in self.orders)

    @property
    def block_sizes(self) -> Sequence[int]:
        return [size for order in self._of_carries for size in order.block_sizes]

    @property
    def adjacent(self) -> int:
        return max(order.adjacent for order in self.orders)

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return tuple(level for order in self.orders for level in order.levels)

    @property
    def undone(self) -> int:
        return self._of_carries[0].undone

    @property
    def keeps_last(self) -> bool:
        return self._of_carries[-1].keeps_last

    @property
    def needs_spare(self) -> bool:
        return any(order.needs_spare for order in self._of_carries)

    @property
    def is_flat(self) -> bool:
        return all(order.is_flat for order in self._of_carries)

    def checked(
        self, step: Step, loop: Loop, held: Flags, inputs: PyTree
    ) -> tuple[Arrays, Arrays, Arrays]:
        return self._of_carries[0].checked(step, loop, held, inputs)

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.length, self.primal_slots
        # A loop of Python: there are few, and no two need be alike.
        for order in reversed(self.orders):
            position -= order.length
            if (own := order.of_carries) is None:
                cts = sweep.pull_stored(cts)
            else:
                row -= own.primal_slots
                within = sweep.part(position) if position else sweep
                cts = own.reverse(within, carries.from_row(row), cts)
        return cts

    def inner_bytes(self, cost: StepCost) -> int:
        # They are reversed one after the other, and XLA gives them the same memory.
        return max(order.inner_bytes(cost) for order in self._of_carries)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        return sum(order.reversed_in(pace, reversal) for order in self._of_carries)

    def pieces(self, reversal: AbstractReversal) -> frozenset[Piece]:
        every = (order.pieces(reversal) for order in self.orders)
        return frozenset[Piece]().union(*every)

    @property
    def kind(self) -> Hashable:
        return super().kind, *(order.kind for order in self.orders)

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        position = start + self.length
        for order in reversed(self.orders):
            position -= order.length
            yield from order.reversal_history(position, slots)
            slots -= order.primal_slots
