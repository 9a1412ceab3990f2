"""The time that the pieces of a gradient take, which orders add up."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Self, TypeAlias

from ._costs import Rates, StepCost, residuals_time, reversal_time
from ._sweep import AbstractReversal

# A part of a gradient that takes a time of its own: one of these, or a kind of reversal
# that stores no residuals.
Piece: TypeAlias = Hashable

# A step that is run, and one that is taken back by its residuals, of whatever number of
# steps these are stored.
ADVANCE = "advance"
RESIDUALS = "residuals"

# By so many times as much as a step that is run, what takes steps back was seen to be
# off. More of it lies in taking them back one by one, as of convolutions on a CPU, and
# says nothing of batches.
_AT_MOST = 2.0


def piece_of(reversal: AbstractReversal) -> Piece:
    """What takes steps back, as a piece."""
    # Blocks of all sizes are one: of steps of thirteen kinds on a CPU, each took about
    # the same multiple of its estimate.
    return RESIDUALS if reversal.stores_residuals else reversal.kind


@dataclasses.dataclass(frozen=True)
class Pace:
    """The times that orders add up to that of a gradient, in nanoseconds.

    They are estimated from the work of a step. Where more is known of a piece, its
    estimate is multiplied by how many times as long it took: that holds for pieces of
    other sizes as well, of which a time would say nothing.

    Attributes:
        cost: The cost of a step.
        rate: The time of single operations on the device.
        known: The cost of a step whose products are known; `None` if none can be.
        seen: The pieces of which more is known, each with that factor.
        is_measured: Whether pieces of this very step were run.
        scatter: By what part of itself the time of a piece differed when it was
            measured again, at the most.
    """

    cost: StepCost
    rate: Rates
    known: StepCost | None = None
    seen: tuple[tuple[Piece, float], ...] = ()
    is_measured: bool = False
    scatter: float = 0.0

    @property
    def of_known(self) -> Self:
        """The pace of steps whose products are known."""
        return dataclasses.replace(self, cost=self.known or self.cost)

    def factor(self, piece: Piece) -> float:
        """How many times as long as estimated a piece takes."""
        seen = dict(self.seen)
        alone = seen.get(ADVANCE, math.inf)
        return seen.get(piece, min(seen.get(RESIDUALS, 1.0), _AT_MOST * alone))

    def with_seen(self, piece: Piece, factor: float) -> Self:
        """This pace where a piece takes `factor` times as long as estimated."""
        seen = {**dict(self.seen), piece: factor}
        return dataclasses.replace(self, seen=tuple(seen.items()))

    @property
    def advance(self) -> float:
        """The time of running one step, by the primal or again."""
        return self.factor(ADVANCE) * self._advance

    @property
    def everything(self) -> float:
        """The time per step of a loop that stores all residuals, both ways."""
        cost, rate = self.cost, self.rate
        back = reversal_time(cost, rate) + residuals_time(cost, rate)
        return self.factor(RESIDUALS) * (self._advance + back)

    def block(self, reversal: AbstractReversal, count: int) -> float:
        """The time of reversing a block of so many steps from the carry before it."""
        estimated = reversal.block_time(self.cost, count, self.rate)
        return self.factor(piece_of(reversal)) * estimated

    @property
    def slot(self) -> float:
        """The time of writing a carry to a slot and reading it from there."""
        # Where XLA fuses all of a step, which takes far less than estimated then, it
        # does so with what reads and writes a slot.
        start = 2 * self.rate.iteration * min(self.factor(ADVANCE), 1.0)
        return 2 * self.cost.held * self.rate.byte + start

    @property
    def _advance(self) -> float:
        return self.cost.evaluation + self.rate.iteration
