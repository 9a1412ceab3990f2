"""The interface of an order: which carries are stored, and how steps are reversed.

An order consists of integers. It is a frozen, hashable dataclass that a schedule makes
for one length. It says how it is run and what that costs. To add an order, subclass
`AbstractSlotOrder` in a file of its own; nothing else in the library asks which order a
layout has.
"""

import abc
import bisect
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays, Flags, pick
from ...._calls import format_bytes
from ...._programs import constant
from ...._types import Index, PyTree, Value
from ...steps._loop import Loop, element
from ...steps._step import Step
from .._costs import StepCost
from .._forward import BySegments
from .._pace import ADVANCE, Pace, Piece, piece_of
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries, DeviceSlots


class Event(NamedTuple):
    """One evaluation of the step, or its reversal with residuals that were stored.

    Attributes:
        kind: Whether the primal runs the step, or it is run again, or it is reversed.
            A reversal without stored residuals evaluates the step, too.
        position: The position of the step.
        slots: How many carries are stored meanwhile.
        residuals: For how many steps residuals are stored meanwhile.
    """

    kind: Literal["primal", "again", "reversal"]
    position: int
    slots: int
    residuals: int = 0


class AbstractOrder(abc.ABC):
    """Which carries of a loop are stored, and in which order its steps are reversed.

    Steps are reversed in blocks: consecutive steps whose residuals are stored together.
    A block of one step has no residuals to store.

    The row `i` of the slots has the carry at `starts[i]`. There is one row more, for
    carries that are computed on the way but not kept, or for the last carry of the loop
    (`keeps_last`).
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
    def starts(self) -> Sequence[int]:
        """The positions whose carries the primal stores, in ascending order."""
        return ()

    @property
    def advances(self) -> int:
        """How many steps are run again only to get to a later carry."""
        return 0

    @property
    def block_sizes(self) -> Sequence[int]:
        """The sizes of blocks: one for each loop over blocks in the program."""
        return [1]

    @property
    def block(self) -> int:
        """How many steps the largest block has."""
        return max(self.block_sizes, default=1)

    @property
    def evaluations(self) -> int:
        """How often one gradient evaluates the step.

        One per step by the primal and one by the reversal, and the advances.
        """
        # Griewank & Walther (2000) count advances up to the end, too. JAX needs the
        # value of the loop before there are cotangents, so the primal is a run of its
        # own.
        return 2 * self.length + self.advances

    @property
    def adjacent(self) -> int:
        """How many consecutive steps, at most, have their carries in adjacent rows.

        So many can be reversed together without running them again.
        """
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
    def of_carries(self) -> "AbstractSlotOrder | None":
        """This order, unless the primal stores residuals alone."""
        return None

    @property
    def steps_with_residuals(self) -> int:
        """For how many of the last steps the primal stores the residuals."""
        return 0

    @abc.abstractmethod
    def by_carries(self) -> "AbstractSlotOrder":
        """The order for a loop whose primal cannot store residuals."""

    @abc.abstractmethod
    def as_part(self) -> "AbstractSlotOrder":
        """The order for a part of a longer loop, whose first carry is stored."""

    @property
    def primal_slots(self) -> int:
        """How many carries the primal stores."""
        return len(self.starts)

    @property
    def moves(self) -> float:
        """About how many carries are written to slots of the primal, or read from them.

        Each is written once, and read once to run its segment again.
        """
        return 2 * self.primal_slots

    @property
    def keeps_last(self) -> bool:
        """Whether the row after those of the starts holds the last carry.

        If residuals are stored, that is the carry before the first step that has some.
        """
        return False

    @property
    def needs_spare(self) -> bool:
        """Whether it cannot do without that row, whatever is in it."""
        return True

    @property
    def undone(self) -> int:
        """How many steps, the first ones, are taken back by an inverse of the step."""
        return 0

    @property
    def saved_rows(self) -> int:
        """How many rows there are for what steps save for their inverse."""
        # Every step writes to a row. There is one more for those that save in vain.
        return self.undone + (0 < self.undone < self.length)

    def saved_of(self, step: Step, held: Flags) -> list[bool]:
        """Of the leaves that are held, those that have a row for each step."""
        return [self.undone > 0 and flag for flag in pick(step.saves, held)]

    @property
    def last_start(self) -> int:
        """How many steps are run to store the carries at all starts."""
        return self.starts[-1] if self.primal_slots else 0

    @property
    def rerun_singly(self) -> int:
        """Of how many steps the carries are stored by `AbstractReversal.rerun`."""
        return 0

    @property
    def stride(self) -> int | None:
        """How many steps lie between two starts, if these are always as many."""
        gaps = {stop - start for start, stop in itertools.pairwise(self.starts)}
        return gaps.pop() if len(gaps) == 1 else None

    @property
    def most_groups(self) -> int:
        """How often a forward sweep may have the step in its program (`Group`)."""
        return 2

    def checked(
        self, step: Step, loop: Loop, held: Flags, inputs: PyTree
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The inputs of the loop, after a check of what this order relies on.

        `held` says which leaves of a carry are stored.
        """
        # The result depends on the check, so XLA does not remove it.
        return inputs

    # How it is run.

    def in_segments(
        self, step: Step, loop: Loop, consts: Arrays, xs: Arrays
    ) -> BySegments:
        """The loop in segments, which begin at the starts."""
        stop = self.length - self.steps_with_residuals
        settings = tuple(self.starts), stop, self.keeps_last
        rest = self.needs_spare, self.most_groups, self.saved_rows
        return BySegments(step, loop, *settings, consts, xs, *rest)

    @property
    def is_flat(self) -> bool:
        """Whether a single loop reverses all blocks, with no other loop around it."""
        return False

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        """Takes cotangents from the end of the loop back to its start.

        `carries` are those at `starts`.
        """
        raise AssertionError("it has no carries to go back from")

    def rerun(
        self, sweep: Sweep, slots: DeviceSlots, carry: Arrays, cts: Cotangents
    ) -> Cotangents:
        """Goes back as `reverse` does, from the first carry of a part of a longer loop.

        The steps are run again up to the last start, to store carries in `slots`.
        """
        stride, starts = self.stride, constant(list(self.starts))

        def move(i: Index, carry: list[Value]) -> list[Value]:
            # At equal distances the trip count is static, so a GPU need not wait for
            # the host.
            if stride:
                return sweep.advance(carry, i * stride, stride)
            return sweep.advance_to(carry, element(starts, i), element(starts, i + 1))

        rows = slots.filled(carry, self.primal_slots + self.needs_spare)
        filled = rows.run_on(carry, self.run_in(sweep), move)
        return self.reverse(sweep, filled, cts)

    def run_in(self, sweep: Sweep) -> Index:
        """At how many of the starts, if not at all, a step was run."""
        count, stride = self.primal_slots, self.stride
        if sweep.count is None:
            return count
        if stride is None:
            return jnp.maximum(jnp.sum(constant(list(self.starts)) < sweep.count), 1)
        # `ceil(count / stride)`. Unlike `//`, `div` rounds towards zero, which saves
        # the correction of a negative quotient: that is clipped anyway.
        left: Value = sweep.count + (stride - 1)
        return jnp.clip(lax.div(left, jnp.asarray(stride, left.dtype)), 0, count)

    # What it costs.

    def stored_bytes(
        self, cost: StepCost, reversal: AbstractReversal, first: bool
    ) -> int:
        """The bytes of the slots and of the reversal of blocks.

        `first` says whether the slots of the primal count, which may be elsewhere.
        """
        return self.slot_bytes(cost, first) + self.bytes_of_blocks(cost, reversal)

    def bytes_of_blocks(self, cost: StepCost, reversal: AbstractReversal) -> int:
        """Of these bytes, what the reversal of blocks takes."""
        return reversal.bytes_of_blocks(cost, self.block_sizes)

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        """The bytes of the slots alone, see `stored_bytes`."""
        of_primal = (self.primal_slots + 1) * self.bytes_of_slot(cost)
        of_primal += self.saved_rows * cost.saved
        return of_primal * first + self.inner_bytes(cost)

    def bytes_of_slot(self, cost: StepCost) -> int:
        """The bytes of a carry at a start."""
        # A leaf that is held only to compute later carries is not needed where none is
        # computed. XLA sees that it is never read, and removes its slots.
        is_last = self.is_flat and self.block == 1 and not self.advances
        return cost.read if is_last else cost.held

    def inner_bytes(self, cost: StepCost) -> int:
        """The bytes of all slots but those of the primal."""
        return 0

    def bytes_of_primal(self, cost: StepCost) -> int:
        """The bytes of what the primal stores: slots, and what steps save."""
        return (self.primal_slots + 1) * cost.held + self.saved_rows * cost.saved

    def filling_time(self, pace: Pace) -> float:
        """How long it takes to store its carries again, but for running the steps."""
        dynamic = 0 if self.stride else self.last_start
        # Entering a loop, making its slots, and reading one for each start.
        entry = 3 * pace.rate.iteration + self.primal_slots * pace.slot
        return dynamic * pace.rate.dynamic_iteration + entry

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        """How long the reversal of its blocks takes, with the loops around them."""
        return 0.0

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        """How long a gradient takes, in nanoseconds."""
        run = (self.length + self.advances) * pace.advance
        return run + self.reversed_in(pace, reversal)

    def pieces(self, reversal: AbstractReversal) -> frozenset[Piece]:
        """The pieces that its time is made up of."""
        return frozenset((ADVANCE, piece_of(reversal)))

    @property
    def kind(self) -> Hashable:
        """What programs of similar orders have in common, see `Layout.kind`."""
        return type(self).__name__

    def stand_in(self, leaves: int) -> tuple["AbstractOrder", int]:
        """An order with a smaller program, to compile for its memory.

        It comes with how many more bytes this one takes; `leaves` are those of a carry.
        """
        return self, 0

    # How it is shown.

    def history(self) -> Iterator[Event]:
        """All events of a gradient, in order."""
        starts, slots = set(self.starts), 0
        is_whole = self.stores_residuals
        first = 0 if is_whole else self.length - self.steps_with_residuals
        for position in range(self.length):
            slots += position in starts
            yield Event("primal", position, slots, max(position + 1 - first, 0))
        yield from self.reversal_history(0, slots)

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        """The events of the reverse sweep, in order, for a loop that starts at `start`.

        `slots` is how many carries are stored when the sweep begins.
        """
        for position in reversed(range(start, start + self.length)):
            yield Event("reversal", position, slots, position + 1 - start)

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        """The bytes that are stored during an event, wherever they are."""
        carries = event.slots * cost.held + self.saved_bytes(cost, event)
        first = self.length - self.steps_with_residuals
        stores = self.block > 1 or event.position >= first
        return carries + event.residuals * cost.residuals * stores

    def saved_bytes(self, cost: StepCost, event: Event) -> int:
        """The bytes of what steps have saved that is needed during an event."""
        return min(event.position + 1, self.undone) * cost.saved

    def stored_by_primal(self, event: Event) -> int:
        """How many of the carries are in slots of the primal during an event."""
        # Segments are reversed last to first, and then their starts are not needed.
        return bisect.bisect_right(self.starts, event.position)

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        """What is stored, as rows of the table that a plan prints."""
        rows = [("stored carries", f"{self.slots}, {format_bytes(cost.held)} each")]
        if cost.saved and self.undone:
            each = format_bytes(cost.saved)
            rows.append(("saved of steps", f"{self.undone}, {each} each"))
        if self.block > 1:
            each = format_bytes(cost.residuals)
            rows.append(("block", f"{self.block} steps, residuals of {each} each"))
        return rows


class AbstractSlotOrder(AbstractOrder):
    """An order whose primal stores carries, from which steps are run again.

    It says at least where these are (`starts`), how often steps are run again
    (`advances`), how it goes back (`reverse`), how long that takes (`reversed_in`), and
    what happens meanwhile (`reversal_history`).
    """

    @property
    def of_carries(self) -> "AbstractSlotOrder":
        return self

    def by_carries(self) -> "AbstractSlotOrder":
        return self

    def as_part(self) -> "AbstractSlotOrder":
        return self

    def only_carries(self) -> "AbstractSlotOrder":
        """The order of those steps that have carries, for a primal that stores no more.

        It is what `FirstAndLast` puts first.
        """
        return self


def block_history(start: int, count: int, slots: int) -> Iterator[Event]:
    """The events of the reversal of a block, for a block of one or of several steps."""
    # A block of one step is run once, by its own reversal.
    if count > 1:
        for offset in range(count):
            yield Event("again", start + offset, slots, offset + 1)
    for offset in reversed(range(count)):
        yield Event("reversal", start + offset, slots, offset + 1)
