"""How long the pieces take that the gradient of a loop is made of."""

import abc
import dataclasses
from typing import TYPE_CHECKING, Self

from ._costs import Rates, StepCost

if TYPE_CHECKING:
    from ._block_reversals import AbstractReversal


class AbstractPace(abc.ABC):
    """What orders add up to the time of a gradient, in nanoseconds.

    Attributes:
        cost: What a step costs.
        rate: What single operations take on the backend in use.
    """

    cost: StepCost
    rate: Rates

    @property
    @abc.abstractmethod
    def is_measured(self) -> bool:
        """Whether that was found by running pieces of this very step."""

    @property
    @abc.abstractmethod
    def advance(self) -> float:
        """One step that is run, by the primal or again."""

    @property
    @abc.abstractmethod
    def everything(self) -> float:
        """One step, run and taken back, of a loop whose residuals are all stored."""

    @abc.abstractmethod
    def block(self, reversal: "AbstractReversal", count: int) -> float:
        """A block of so many steps, taken back from the carry before it."""

    @abc.abstractmethod
    def recomputing(self, cost: StepCost, again: float) -> Self:
        """The same for a step that keeps something else, as a guess.

        Args:
            cost: What that step costs.
            again: How much more it computes again, as work.
        """

    @abc.abstractmethod
    def beside(self, other: "AbstractPace") -> Self:
        """The same at a moment when the step was run as fast as in another pace.

        What was measured at two times may differ by how busy the machine was.
        """

    @property
    def slot(self) -> float:
        """A carry, written to a slot and read from it."""
        return 2 * self.cost.held * self.rate.byte + 2 * self.rate.iteration


@dataclasses.dataclass(frozen=True)
class Estimated(AbstractPace):
    """What the work of a step takes at the rates of the backend."""

    cost: StepCost
    rate: Rates

    @property
    def is_measured(self) -> bool:
        return False

    @property
    def advance(self) -> float:
        return self.cost.evaluation + self.rate.iteration

    @property
    def everything(self) -> float:
        cost, rate = self.cost, self.rate
        return self.advance + reversal_time(cost, rate) + residuals_time(cost, rate)

    def block(self, reversal: "AbstractReversal", count: int) -> float:
        return reversal.block_time(self.cost, count, self.rate)

    def recomputing(self, cost: StepCost, again: float) -> Self:
        return dataclasses.replace(self, cost=cost)

    def beside(self, other: AbstractPace) -> Self:
        return self


def reversal_time(cost: StepCost, rate: Rates) -> float:
    """What it takes to take a step back, given its residuals."""
    # The cotangents of what all steps share are a sum, which every step adds to.
    return cost.reversal + rate.iteration + 2 * cost.ct_consts * rate.byte_of_sums


def residuals_time(cost: StepCost, rate: Rates) -> float:
    """What it takes to store the residuals of a step and to read them."""
    return 2 * cost.residuals * rate.byte + cost.reads * rate.entry_of_reads
