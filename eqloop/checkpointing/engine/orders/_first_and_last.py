"""The first steps by one order, and the last ones by another.

What is stored of the last steps is needed first, and then its room is free for the way
back through the others. So the last steps may store all of their residuals, as far as
there is room, and are not run again.

It saves time: without it, a stack of 24 layers in 95 % of the memory that it takes to
store everything evaluates each layer twice, and with it all but two of them once.
"""

import dataclasses
from collections.abc import Sequence

from ...._calls import format_bytes
from .._costs import StepCost
from .._pace import Pace
from .._sweep import AbstractReversal
from ._order import AbstractOrder, AbstractSlotOrder
from ._tree import AbstractJoined


@dataclasses.dataclass(frozen=True)
class FirstAndLast(AbstractJoined):
    """Two orders, one after the other, for both of which the primal stores.

    Attributes:
        first: The order of the first steps.
        last: The order of the last ones. If it stores residuals, the primal has them.
    """

    first: AbstractSlotOrder
    last: AbstractOrder

    @property
    def orders(self) -> Sequence[AbstractOrder]:
        return self.first, self.last

    @property
    def steps_with_residuals(self) -> int:
        return self.last.length if self.last.stores_residuals else 0

    def by_carries(self) -> "FirstAndLast":
        return dataclasses.replace(self, last=self.last.by_carries())

    def as_part(self) -> "FirstAndLast":
        return FirstAndLast(self.first.as_part(), self.last.as_part())

    def only_carries(self) -> AbstractSlotOrder:
        return self if self.last.of_carries else self.first.only_carries()

    def stored_bytes(
        self, cost: StepCost, reversal: AbstractReversal, first: bool
    ) -> int:
        # The residuals are gone when the slots of inner levels and blocks are in use.
        inner = self.slot_bytes(cost, False) + self.bytes_of_blocks(cost, reversal)
        of_primal = self.slot_bytes(cost, first) - self.slot_bytes(cost, False)
        return of_primal + max(inner, self.steps_with_residuals * cost.residuals)

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        return sum(order.duration(pace, reversal) for order in self.orders)

    def stand_in(self, leaves: int) -> tuple["FirstAndLast", int]:
        first, more = self.first.stand_in(leaves)
        return dataclasses.replace(self, first=first), more

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        steps, each = self.steps_with_residuals, format_bytes(cost.residuals)
        if not steps:
            return super().described(cost)
        text = f"the last {steps} of {self.length} steps store everything, {each} each"
        return [*self.first.described(cost), ("residuals", text)]
