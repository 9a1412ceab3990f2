"""What an order is: which carries are stored, and how the steps are reversed from them.

An order is integers: a frozen, hashable dataclass, made by a schedule for one length.
It says how it is run and what that costs. To add an order, subclass `AbstractOrder` in
a file of its own; nothing else in the library asks which order it has.
"""

import abc
import bisect
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...._bytes import format_bytes
from ...._partition import Arrays, Flags
from ...._typecheck import PyTree
from .._costs import AbstractPace, StepCost

if TYPE_CHECKING:
    from .._loop import Loop
    from .._step import Step
    from .._sweep import Cotangents, Sweep
    from ..reversals._block_reversals import AbstractReversal
    from ..slots._slots import Carries


class Event(NamedTuple):
    """One evaluation of the step, or its reversal with residuals that were stored.

    Attributes:
        kind: Whether the primal runs the step, or it is run again, or it is reversed.
            Without residuals a reversal evaluates the step as well.
        position: Which step.
        slots: How many carries are stored meanwhile.
        residuals: Of how many steps the residuals are stored.
        far: Of an order of two places, how many of the carries are in the second one.
    """

    kind: Literal["primal", "again", "reversal"]
    position: int
    slots: int
    residuals: int = 0
    far: int = 0

    def within(self, start: int, slots: int) -> "Event":
        """The same in a loop that runs so many steps, and has so many slots, before."""
        return self._replace(position=self.position + start, slots=self.slots + slots)


class AbstractOrder(abc.ABC):
    """Which carries of a loop are stored, and in which order its steps are reversed.

    Steps are reversed in blocks: consecutive steps whose residuals are stored together.
    A block of one step has no residuals to store.
    """

    # What is stored, and how often the step is evaluated: integers.

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """How many steps the loop has."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """How many carries are stored at once, at the most."""

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """How many steps the largest block has."""

    @property
    @abc.abstractmethod
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient, by the primal included."""

    @property
    def adjacent(self) -> int:
        """How many steps, at most, are reversed from carries that lie side by side."""
        return self.block

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """How many segments each nested level has, if there are levels."""
        return ()

    @property
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries: JAX's own derivative."""
        return False

    @property
    def steps_with_products(self) -> int:
        """For how many steps, the last ones, the primal stores their products."""
        return 0

    @abc.abstractmethod
    def by_carries(self) -> "AbstractSlotOrder":
        """The order for a loop whose primal cannot store residuals."""

    @abc.abstractmethod
    def as_part(self) -> "AbstractSlotOrder":
        """The order for some steps of a loop, of which the first carry is known."""

    # What it costs.

    @abc.abstractmethod
    def stored_bytes(
        self, cost: StepCost, reversal: "AbstractReversal", first: bool
    ) -> int:
        """The bytes of the slots, and of what the reversal of blocks takes.

        Args:
            cost: What a step costs.
            reversal: How a block is taken back.
            first: Whether to count the slots of the primal: they may be elsewhere.
        """

    def bytes_of_blocks(self, cost: StepCost, reversal: "AbstractReversal") -> int:
        """Of these bytes, what the reversal of blocks takes."""
        return 0

    @abc.abstractmethod
    def duration(self, pace: AbstractPace, reversal: "AbstractReversal") -> float:
        """How long a gradient takes, in nanoseconds.

        Args:
            pace: How long its pieces take.
            reversal: How a block is taken back.
        """

    def asks_for_products(self, reversal: "AbstractReversal") -> bool:
        """Whether its time depends on that of steps whose products are known."""
        return False

    @property
    @abc.abstractmethod
    def kind(self) -> Hashable:
        """Orders of one kind make similar programs: one is a guide to the others."""

    def stand_in(self, leaves: int) -> tuple["AbstractOrder", int]:
        """An order that takes as much memory, of which the program is small.

        Args:
            leaves: How many leaves the carry has.

        Returns:
            The order, and the bytes that this one takes besides.
        """
        return self, 0

    # How it is shown.

    @abc.abstractmethod
    def history(self) -> Iterator[Event]:
        """All that a gradient does, in order."""

    @abc.abstractmethod
    def event_bytes(self, cost: StepCost, event: Event) -> int:
        """The bytes that are stored during an event, wherever they are."""

    @abc.abstractmethod
    def stored_by_primal(self, event: Event) -> int:
        """How many of the carries are in slots of the primal during an event."""

    @abc.abstractmethod
    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        """What is stored, in words, as rows of the table that a plan prints."""


class AbstractSlotOrder(AbstractOrder):
    """An order whose primal stores carries, from which steps are run again."""

    @property
    @abc.abstractmethod
    def starts(self) -> Sequence[int]:
        """The positions whose carries the primal stores, in ascending order."""

    @property
    @abc.abstractmethod
    def advances(self) -> int:
        """How many steps are run again only to get to a carry."""

    @property
    @abc.abstractmethod
    def block_sizes(self) -> Sequence[int]:
        """The size of the blocks of each loop over blocks that is in the program."""

    @property
    def block(self) -> int:
        return max(self.block_sizes, default=1)

    @property
    def evaluations(self) -> int:
        """The primal, the reversal of every step, and the advances in between."""
        return 2 * self.length + self.advances

    @property
    def keeps_last(self) -> bool:
        """Whether the row beyond those of the starts is for the last carry."""
        return False

    def checked(
        self, step: "Step", loop: "Loop", held: Flags, inputs: PyTree
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The inputs of the loop, after a check of what this order relies on.

        Args:
            step: The step.
            loop: The loop.
            held: Which leaves of a carry are stored.
            inputs: Consts, the initial carry and `xs`.
        """
        return inputs

    def by_carries(self) -> "AbstractSlotOrder":
        return self

    def as_part(self) -> "AbstractSlotOrder":
        return self

    # How it is run.

    @property
    def is_flat(self) -> bool:
        """Whether blocks are reversed by one loop, which has no other loop in it."""
        return False

    @abc.abstractmethod
    def reverse(
        self, sweep: "Sweep", carries: "Carries", cts: "Cotangents"
    ) -> "Cotangents":
        """Takes cotangents from the end of the loop back to its start.

        Args:
            sweep: The loop, and what is done to a block.
            carries: Those at `starts`.
            cts: The cotangents at the end.
        """

    # What it costs.

    @abc.abstractmethod
    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        """The bytes of the slots alone, see `stored_bytes`."""

    @abc.abstractmethod
    def reversed_in(self, pace: AbstractPace, reversal: "AbstractReversal") -> float:
        """How long its blocks take to be taken back, and the loops around them."""

    def stored_bytes(
        self, cost: StepCost, reversal: "AbstractReversal", first: bool
    ) -> int:
        return self.slot_bytes(cost, first) + self.bytes_of_blocks(cost, reversal)

    def bytes_of_blocks(self, cost: StepCost, reversal: "AbstractReversal") -> int:
        return reversal.bytes_of_blocks(cost, self.block_sizes)

    def duration(self, pace: AbstractPace, reversal: "AbstractReversal") -> float:
        run = (self.length + self.advances) * pace.advance
        return run + self.reversed_in(pace, reversal)

    # How it is shown.

    def history(self) -> Iterator[Event]:
        starts, slots = set(self.starts), 0
        for position in range(self.length):
            slots += position in starts
            yield Event("primal", position, slots)
        yield from self.reversal_history(0, slots)

    @abc.abstractmethod
    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        """All that is done on the way back, in order.

        Args:
            start: The position at which the loop starts, if it is a part of another.
            slots: How many carries are stored as it begins.
        """

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        carries = event.slots * cost.held
        return carries + (event.residuals * cost.residuals if self.block > 1 else 0)

    def stored_by_primal(self, event: Event) -> int:
        # Segments are reversed last to first, and then their starts are read no more.
        return bisect.bisect_right(self.starts, event.position)

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        rows = [("stored carries", f"{self.slots}, {format_bytes(cost.held)} each")]
        if self.block > 1:
            each = format_bytes(cost.residuals)
            rows.append(("block", f"{self.block} steps, residuals of {each} each"))
        return rows


def block_history(start: int, count: int, slots: int) -> Iterator[Event]:
    """The reversal of a block: one step at once, or several by their residuals."""
    if count > 1:
        for offset in range(count):
            yield Event("again", start + offset, slots, offset + 1)
    for offset in reversed(range(count)):
        yield Event("reversal", start + offset, slots, offset + 1)
