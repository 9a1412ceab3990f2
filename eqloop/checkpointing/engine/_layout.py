"""What a schedule decides for one loop: an order, slots, and a reversal."""

import dataclasses

from ._costs import Rates, StepCost
from ._order import AbstractOrder
from ._reversals import AbstractReversal, ByResiduals
from ._slots import AbstractSlots, DeviceSlots


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one loop is stored and reversed.

    Attributes:
        order: Which carries are stored, and in which order the steps are reversed.
        slots: Where the carries are that the primal stores.
        reversal: How one block is taken back.
    """

    order: AbstractOrder
    slots: AbstractSlots = dataclasses.field(default_factory=DeviceSlots)
    reversal: AbstractReversal = dataclasses.field(default_factory=ByResiduals)

    @property
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries."""
        return self.order.stores_residuals

    def stored_bytes(self, cost: StepCost) -> int:
        """The bytes of slots and of residuals of blocks, on the device."""
        first = self.slots.take_device_memory
        return self.order.stored_bytes(cost, self.reversal, first)

    def duration(self, cost: StepCost, rate: Rates) -> float:
        """Nanoseconds, roughly; good for comparing layouts with one another."""
        return self.order.duration(cost, self.reversal, rate)

    def by_carries(self) -> "Layout":
        """The same for a loop whose primal cannot store residuals."""
        return dataclasses.replace(self, order=self.order.by_carries())
