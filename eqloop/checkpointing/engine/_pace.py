"""The time that the pieces of a gradient take, which orders add up."""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple, Self

from ._costs import Rates, StepCost, residuals_time, reversal_time
from ._sweep import AbstractReversal


class Piece(NamedTuple):
    """A part of a gradient that takes a time of its own.

    Attributes:
        kind: What it is: one of those below, or the kind of a reversal.
        is_block: Of a reversal, whether it takes blocks of steps back, which are run
            again for it. Steps whose carries are stored tell nothing of these.
        is_known: Whether the products of the steps are known.
    """

    kind: Hashable
    is_block: bool = False
    is_known: bool = False


# A step that is run, one whose residuals are all stored, there and back, and one that
# is run in several segments side by side.
ADVANCE = Piece("advance")
EVERYTHING = Piece("everything")
SIDE_BY_SIDE = Piece("side by side")


def block_piece(reversal: AbstractReversal, count: int) -> Piece:
    """The reversal of a block of so many steps, as a piece."""
    return Piece(reversal.kind, is_block=count > 1)


@dataclasses.dataclass(frozen=True)
class Pace:
    """The times that orders add up to that of a gradient, in nanoseconds.

    They are estimated from the work of a step. Where more is known of a piece, its
    estimate is multiplied by how many times as long it took: that holds for pieces of
    other sizes as well, of which a time would say nothing.

    Attributes:
        cost: The cost of a step.
        rate: The time of single operations on the device.
        seen: The pieces of which more is known, each with that factor.
        of_known: The pace of steps whose products are known; `None` if none can be.
        is_measured: Whether pieces of this very step were run.
        scatter: By what part of itself the time of a piece differed when it was
            measured again, at the most.
    """

    cost: StepCost
    rate: Rates
    seen: tuple[tuple[Piece, float], ...] = ()
    of_known: "Pace | None" = None
    is_measured: bool = False
    scatter: float = 0.0

    def factor(self, piece: Piece) -> float:
        """How many times as long as estimated a piece takes."""
        seen = dict(self.seen)
        if piece in seen or piece == SIDE_BY_SIDE:
            return seen.get(piece, 1.0)
        # A block runs steps and stores residuals as well, so its estimate may be as far
        # off as either. The lower one has it tried rather than forgotten.
        return min(
            (seen[one] for one in (ADVANCE, EVERYTHING) if one in seen), default=1.0
        )

    def with_seen(self, piece: Piece, factor: float) -> Self:
        """The same where a piece takes so many times as long as estimated."""
        known = self.of_known
        if known is not None and piece.is_known:
            known = known.with_seen(piece._replace(is_known=False), factor)
            return dataclasses.replace(self, of_known=known)
        if known is not None and piece not in dict(known.seen):
            # Until it is seen, the best guess with known products is as without.
            known = known.with_seen(piece, factor)
        seen = {**dict(self.seen), piece: factor}
        return dataclasses.replace(self, seen=tuple(seen.items()), of_known=known)

    @property
    def advance(self) -> float:
        """The time of running one step, by the primal or again."""
        return self.factor(ADVANCE) * self._advance

    def advance_side_by_side(self, count: int) -> float:
        """The time of one step of one segment, if so many are run side by side."""
        cost, rate = self.cost, self.rate
        shared = cost.shared + cost.dots * rate.dot_of_batch + rate.iteration
        each = cost.evaluation - cost.shared + shared / count
        return self.factor(SIDE_BY_SIDE) * self.factor(ADVANCE) * each

    @property
    def everything(self) -> float:
        """The time per step of a loop that stores all residuals, both ways."""
        cost, rate = self.cost, self.rate
        back = reversal_time(cost, rate) + residuals_time(cost, rate)
        return self.factor(EVERYTHING) * (self._advance + back)

    def block(self, reversal: AbstractReversal, count: int) -> float:
        """The time of reversing a block of so many steps from the carry before it."""
        estimated = reversal.block_time(self.cost, count, self.rate)
        return self.factor(block_piece(reversal, count)) * estimated

    @property
    def slot(self) -> float:
        """The time of writing a carry to a slot and reading it from there."""
        return 2 * self.cost.held * self.rate.byte + 2 * self.rate.iteration

    @property
    def _advance(self) -> float:
        return self.cost.evaluation + self.rate.iteration
