"""Every residual is stored by the primal, and the steps are reversed all at once."""

import dataclasses
from collections.abc import Hashable, Iterator

from ..._bytes import format_bytes
from ._costs import Rates, StepCost
from ._levels import Nest
from ._nested import Nested
from ._order import AbstractOrder, AbstractSlotOrder, Event
from ._reversals import AbstractReversal, residuals_time


@dataclasses.dataclass(frozen=True)
class AllAtOnce(AbstractOrder):
    """The whole loop is one block, whose residuals are stored while the primal runs."""

    steps: int

    @property
    def length(self) -> int:
        return self.steps

    @property
    def block(self) -> int:
        return self.steps

    @property
    def slots(self) -> int:
        return 0

    @property
    def evaluations(self) -> int:
        """Once by the primal, and never again."""
        return self.steps

    @property
    def stores_residuals(self) -> bool:
        return True

    def by_carries(self) -> AbstractSlotOrder:
        return Nested((Nest((self.steps,)),))

    def as_part(self) -> AbstractSlotOrder:
        return Nested((Nest((1,), self.steps),))

    def stored_bytes(
        self, cost: StepCost, reversal: AbstractReversal, first: bool
    ) -> int:
        return cost.everything

    def duration(
        self, cost: StepCost, reversal: AbstractReversal, rate: Rates
    ) -> float:
        step = cost.evaluation + cost.reversal + 2 * rate.iteration
        return self.steps * (step + residuals_time(cost, rate))

    @property
    def kind(self) -> Hashable:
        return "all at once"

    def history(self) -> Iterator[Event]:
        for position in range(self.steps):
            yield Event("primal", position, 0, position + 1)
        for position in reversed(range(self.steps)):
            yield Event("reversal", position, 0, position + 1)

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        return cost.everything * event.residuals // self.steps

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        each = format_bytes(cost.everything // max(self.steps, 1))
        return [("stored", f"residuals, {each} a step")]
