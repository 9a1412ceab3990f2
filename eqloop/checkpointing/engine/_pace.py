"""The time that the pieces of a gradient take, which orders add up."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Self

from ._costs import Rates, StepCost, residuals_time, reversal_time
from .reversals._block_reversals import AbstractReversal


@dataclasses.dataclass(frozen=True)
class AbstractPace(abc.ABC):
    """The times that orders add up to that of a gradient, in nanoseconds.

    Attributes:
        cost: The cost of a step.
        rate: The time of single operations on the backend in use.
        of_known: The pace of steps whose products are known; `None` if none can be.
    """

    cost: StepCost
    rate: Rates
    of_known: "AbstractPace | None" = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def is_measured(self) -> bool:
        """Whether the times were measured by running pieces of this very step."""

    @property
    @abc.abstractmethod
    def advance(self) -> float:
        """The time of running one step, by the primal or again."""

    @abc.abstractmethod
    def advance_side_by_side(self, count: int) -> float:
        """The time of one step of one segment, if so many are run side by side."""

    @property
    @abc.abstractmethod
    def everything(self) -> float:
        """The time per step of a loop that stores all residuals, both ways."""

    @abc.abstractmethod
    def block(self, reversal: AbstractReversal, count: int) -> float:
        """The time of reversing a block of so many steps from the carry before it."""

    @abc.abstractmethod
    def recomputing(self, cost: StepCost, again: float) -> Self:
        """A guess for a step with another policy.

        Args:
            cost: The cost of that step.
            again: How much more work it repeats when it is reversed.
        """

    @abc.abstractmethod
    def with_known_products(self, cost: StepCost) -> Self:
        """A guess for a step whose products are known.

        Args:
            cost: The cost of that step.
        """

    @abc.abstractmethod
    def with_side_by_side(self, factors: Sequence[tuple[int, float]]) -> Self:
        """The same, if it was measured how long steps take side by side.

        Args:
            factors: Numbers of segments, and for each the time of a step of one of them
                as a part of `advance`.
        """

    @abc.abstractmethod
    def beside(self, other: "AbstractPace") -> Self:
        """The same, scaled so that an evaluation takes as long as in another pace.

        The machine may have been busier when one of the two was measured.
        """

    @property
    def slot(self) -> float:
        """The time of writing a carry to a slot and reading it from there."""
        return 2 * self.cost.held * self.rate.byte + 2 * self.rate.iteration


@dataclasses.dataclass(frozen=True)
class Estimated(AbstractPace):
    """Times that are estimated from the work of a step and the rates of the backend."""

    @property
    def is_measured(self) -> bool:
        return False

    @property
    def advance(self) -> float:
        return self.cost.evaluation + self.rate.iteration

    def advance_side_by_side(self, count: int) -> float:
        cost, rate = self.cost, self.rate
        shared = cost.shared + cost.dots * rate.dot_of_batch + rate.iteration
        return cost.evaluation - cost.shared + shared / count

    @property
    def everything(self) -> float:
        cost, rate = self.cost, self.rate
        return self.advance + reversal_time(cost, rate) + residuals_time(cost, rate)

    def block(self, reversal: AbstractReversal, count: int) -> float:
        return reversal.block_time(self.cost, count, self.rate)

    def recomputing(self, cost: StepCost, again: float) -> Self:
        return dataclasses.replace(self, cost=cost)

    def with_known_products(self, cost: StepCost) -> Self:
        return dataclasses.replace(self, cost=cost)

    def with_side_by_side(self, factors: Sequence[tuple[int, float]]) -> Self:
        return self

    def beside(self, other: AbstractPace) -> Self:
        return self
