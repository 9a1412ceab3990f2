"""What a schedule decides for one loop: an order, slots, and a reversal."""

import abc
import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING, Self, TypeAlias

from ._costs import AbstractPace, StepCost
from ._loop import nbytes
from ._step import Step
from .orders._order import AbstractOrder
from .reversals._block_reversals import AbstractReversal, ByResiduals
from .slots._slots import AbstractSlots, DeviceSlots

if TYPE_CHECKING:
    from .leaves._saves import Needs

# A kind of reversal, and of how many steps at once.
Piece: TypeAlias = tuple[Hashable, int]


class AbstractLayout(abc.ABC):
    """How one loop is stored and reversed, for whoever differentiates it.

    It is a frozen, hashable dataclass. Only a loop of its kind runs by it, and knows
    what else there is to it: a `Layout`, or an `AbstractWhileLayout` of `whiles`.

    Attributes:
        slots: Where the carries are that the primal stores.
        reversal: How one block of steps is taken back.
        kept: The names of what a step keeps, if that was chosen, see `Layout`.
    """

    slots: AbstractSlots
    reversal: AbstractReversal
    kept: tuple[str, ...] | None

    @property
    @abc.abstractmethod
    def block(self) -> int:
        """How many steps are reversed at once, at the most."""

    @property
    @abc.abstractmethod
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries."""

    @property
    def steps_with_products(self) -> int:
        """For how many steps, the last ones, the primal stores their products."""
        return 0

    @abc.abstractmethod
    def by_carries(self) -> Self:
        """The same for a loop whose primal cannot store residuals."""

    def for_needs(self, step: Step, needs: "Needs") -> "AbstractLayout":
        """The same for a way back that reads no more of the carries of such steps."""
        return self


@dataclasses.dataclass(frozen=True)
class Layout(AbstractLayout):
    """How one loop is stored and reversed: what a schedule decides.

    Args:
        order: Which carries are stored, and in which order the steps are reversed.
        slots: Where the carries are that the primal stores.
        reversal: How one block of steps is taken back.
        kept: The names of what a step keeps, where the schedule has chosen that too;
            the rest is computed again. Otherwise `None`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> scan = el.Scan(step, schedule=el.Offload(el.Binomial(8)))
        >>> layout = scan.plan(0.0, jnp.ones(1000)).layout
        >>> layout.order
        Revolved(steps=1000, checkpoints=8, block_size=1)
        >>> layout.slots
        HostSlots(precision=None)
    """

    order: AbstractOrder
    slots: AbstractSlots = dataclasses.field(default_factory=DeviceSlots)
    reversal: AbstractReversal = dataclasses.field(default_factory=ByResiduals)
    kept: tuple[str, ...] | None = None

    @property
    def block(self) -> int:
        """How many steps are reversed at once, at the most."""
        return self.order.block

    @property
    def is_elsewhere(self) -> bool:
        """Whether the primal stores carries in another place than on the device."""
        return not self.stores_residuals and self.slots != self.slots.near

    def bytes_elsewhere(self, cost: StepCost) -> int:
        """The bytes of carries in another place than on the device.

        Args:
            cost: What a step costs, see `stored_cost`.

        Returns:
            Those of all slots there, and of the row that is for carries without one.
        """
        if not self.is_elsewhere:
            return 0
        return (len(self.order.by_carries().starts) + 1) * cost.held

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient that has no policy."""
        again = 0 if self.slots.outlast_primal else self.order.length
        return self.order.evaluations + again

    @property
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries."""
        return self.order.stores_residuals

    @property
    def steps_with_products(self) -> int:
        """For how many steps, the last ones, the primal stores their products."""
        return self.order.steps_with_products

    @property
    def kind(self) -> Hashable:
        """Layouts of one kind make similar programs: one is a guide to the others."""
        return self.order.kind, self.reversal.kind, self.kept is None

    @property
    def piece(self) -> Piece:
        """What it is made of, if it stores carries: how many steps are taken back."""
        return self.reversal.kind, self.reversal.batch(self.order.block)

    def stored_cost(self, cost: StepCost) -> StepCost:
        """The cost of a step whose carry is stored in the form that slots have.

        Args:
            cost: What a step costs.

        Returns:
            The same, with the bytes that a slot takes.
        """
        types = self.slots.packed_types(cost.held_types)
        return dataclasses.replace(cost, held=nbytes(types))

    def stored_bytes(self, cost: StepCost) -> int:
        """What is stored, as far as it can be counted.

        Args:
            cost: What a step costs.

        Returns:
            The bytes of slots and of residuals of blocks, on the device.
        """
        first = self.slots.take_device_memory
        return self.order.stored_bytes(cost, self.reversal, first)

    def duration(self, pace: AbstractPace) -> float:
        """How long a gradient takes.

        Args:
            pace: How long its pieces take.

        Returns:
            Nanoseconds.
        """
        again = 0 if self.slots.outlast_primal else self.order.length
        # Loops that are measured are long, and their blocks include it.
        start = 0.0 if pace.is_measured else self.reversal.start
        run = again * pace.advance + self.order.duration(pace, self.reversal)
        return start + run

    def by_carries(self) -> Self:
        """The same for a loop whose primal cannot store residuals.

        Returns:
            A layout whose order is one of carries.
        """
        order = self.order.by_carries()
        # Steps that are reversed one by one have nothing to gain from keeping values.
        kept = self.kept if order.block > 1 else None
        return dataclasses.replace(self, order=order, kept=kept)
