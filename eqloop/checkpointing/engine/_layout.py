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

# What planning measures and remembers: a kind of reversal, and how many steps at once.
Piece: TypeAlias = tuple[Hashable, int]


class AbstractLayout(abc.ABC):
    """What the two primitives ask of any layout: a frozen, hashable dataclass.

    The rest depends on how the loop goes on. A loop of known length runs by a `Layout`,
    a while loop by an `AbstractWhileLayout` (`whiles/`).

    Attributes:
        slots: Where the primal stores carries, and in which form.
        reversal: How one block of steps is taken back.
        kept: The names of the values that a step keeps, see `Layout`.
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

    @property
    def reads_init(self) -> bool:
        """Whether the way back reads the initial carry among the loop's own inputs."""
        return False

    @abc.abstractmethod
    def by_carries(self) -> Self:
        """The same for a loop whose primal can store carries, but no residuals."""

    def for_needs(self, step: Step, needs: "Needs") -> "AbstractLayout":
        """The same for a way back that reads no more than these leaves of carries.

        Args:
            step: The step.
            needs: The leaves that the way back reads.

        Returns:
            A layout that may store less; this one, if nothing follows from it.
        """
        return self


@dataclasses.dataclass(frozen=True)
class Layout(AbstractLayout):
    """How one loop is stored and reversed: what a schedule decides.

    For a schedule of another project it is what `loop.cut` returns, as a whole. What it
    consists of is for the schedules of this library, and may change with any version.

    Args:
        order: Which carries are stored, and in which order the steps are reversed.
        slots: Where the primal stores carries, and in which form.
        reversal: How one block of steps is taken back.
        kept: The names of the values that a step keeps when it is reversed, if the
            schedule has chosen them; it computes the rest again. Otherwise `None`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> scan = el.Scan(step, schedule=el.Offload(el.Binomial(8)))
        >>> layout = scan.plan(0.0, jnp.ones(1000)).pinned.only
        >>> layout == scan.plan(1.0, jnp.zeros(1000)).pinned.only
        True
    """

    order: AbstractOrder
    slots: AbstractSlots = dataclasses.field(default_factory=DeviceSlots)
    reversal: AbstractReversal = dataclasses.field(default_factory=ByResiduals)
    kept: tuple[str, ...] | None = None

    @property
    def block(self) -> int:
        """How many consecutive steps have their residuals stored together."""
        return self.order.block

    @property
    def is_elsewhere(self) -> bool:
        """Whether the primal stores carries somewhere else than on the device."""
        return not self.stores_residuals and self.slots != self.slots.near

    def bytes_elsewhere(self, cost: StepCost) -> int:
        """The bytes of stored carries that are not on the device.

        Args:
            cost: What a step costs, see `stored_cost`.

        Returns:
            The bytes of all slots there, and of one more row: loops also write the
            carries that are not kept, and these all go to that row.
        """
        if not self.is_elsewhere:
            return 0
        return (len(self.order.by_carries().starts) + 1) * cost.held

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient that has no policy."""
        # If slots do not last until the cotangents come, the loop is run once more.
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
        """What programs of similar layouts have in common.

        The memory that XLA was seen to use for one layout is a guide to the others of
        its kind.
        """
        return self.order.kind, self.reversal.kind, self.kept is None

    @property
    def piece(self) -> Piece:
        """The unit that its time is made up of: one reversal of so many steps."""
        return self.reversal.kind, self.reversal.batch(self.order.block)

    def stored_cost(self, cost: StepCost) -> StepCost:
        """The cost of a step whose carry is stored in the form of the slots.

        Args:
            cost: What a step costs.

        Returns:
            The same, with the bytes that a slot takes.
        """
        types = self.slots.packed_types(cost.held_types)
        return dataclasses.replace(cost, held=nbytes(types))

    def stored_bytes(self, cost: StepCost) -> int:
        """The bytes on the device that slots and the residuals of blocks take.

        This is counted. What XLA needs besides is found out by `planning`.

        Args:
            cost: What a step costs.

        Returns:
            The bytes.
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
        # A measured pace comes from loops of many blocks, and so includes the start.
        start = 0.0 if pace.is_measured else self.reversal.start
        run = again * pace.advance + self.order.duration(pace, self.reversal)
        return start + run

    def by_carries(self) -> Self:
        """The same for a loop whose primal can store carries, but no residuals.

        Returns:
            A layout whose order is one of carries.
        """
        order = self.order.by_carries()
        # A step that is reversed by itself is run right before, and keeps its residuals
        # only until then. A policy would have it compute some of them a second time.
        kept = self.kept if order.block > 1 else None
        return dataclasses.replace(self, order=order, kept=kept)
