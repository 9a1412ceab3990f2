"""What a schedule decides for one loop: an order, slots, and a reversal.

From it follows what the loop saves for its way back (`Saves`, `Needs`), and so what it
leaves behind (`Stored`).
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar, Generic, NamedTuple, Self, TypeVar

import jax

from ..._arrays import Arrays, Flags, nbytes, pick, union
from ..._types import PyTree, Value
from ..steps._loop import Loop
from ..steps._step import Step
from ._costs import StepCost
from ._pace import Pace, Piece
from ._sweep import AbstractReversal, Cotangents, Sweep
from .orders._levels import Nest
from .orders._order import AbstractOrder, AbstractSlotOrder
from .reversals._block_reversals import ByResiduals
from .slots._slots import AbstractSlots, DeviceSlots


class Needs(NamedTuple):
    """The leaves of the carries that a reverse sweep needs.

    The carry here lacks the first `Problem.lead` leaves.

    Attributes:
        held: Which leaves slots hold.
        final: Which leaves are stored once: for buffers whose rows are written once, as
            they are after the last step (`_rows_once.py`), and for others a list of
            what is written to them (`_row_lists.py`).
    """

    held: Flags
    final: Flags

    def with_those_of(self, other: "Needs") -> "Needs":
        """The leaves that at least one of two sweeps needs."""
        pairs = zip(self, other, strict=True)
        return Needs(*(tuple(union(*pair)) for pair in pairs))

    def changed(self, change: Callable[[Flags], Sequence[bool]]) -> "Needs":
        """These needs after a change of the leaves of the carry."""
        return Needs(*(tuple(change(flags)) for flags in self))

    def serves(self, other: "Needs") -> bool:
        """Whether a sweep that needs others finds all of them among these."""
        # What it needs in slots has to be in slots. What it needs once may be in
        # either: a leaf that slots hold need not be made from the last carry.
        known = tuple(union(self.held, self.final))
        of_slots, of_known = union(self.held, other.held), union(known, other.final)
        return tuple(of_slots) == self.held and tuple(of_known) == known


class AbstractRunner(abc.ABC):
    """Runs a loop by itself, in place of the sweeps of the engine, and its way back.

    What is stored is what the layout says, and in the same form. So it may leave either
    of the two to the engine, by returning `None`. A frozen, hashable dataclass.

    Attributes:
        kernel: How the names of its kernels begin.
    """

    kernel: ClassVar[str]

    @abc.abstractmethod
    def forward(
        self, step: Step, loop: Loop, saves: "Saves[Layout] | None", inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]] | None:
        """Runs a loop: the final carry, `ys`, and the slots.

        `saves` is what to store for the way back; `None` for nothing.
        """

    @abc.abstractmethod
    def reverse(
        self, sweep: Sweep, layout: "Layout", carries: Arrays, carried: Arrays
    ) -> Cotangents | None:
        """Goes back through a loop: the cotangents of all inputs.

        `carries` is what is in the slots, `carried` what goes back from the end.
        """

    @abc.abstractmethod
    def described(self, step: Step, loop: Loop, layout: "Layout") -> str:
        """How it runs a loop, or why it does not, for the table of a plan."""

    @abc.abstractmethod
    def storing(self, nests: Sequence[Nest]) -> Self:
        """This runner for a loop that stores the carries of other nests."""


class AbstractLayout(abc.ABC):
    """What the two primitives ask of any layout: a frozen, hashable dataclass.

    The rest depends on how the loop goes on. A loop of known length runs by a `Layout`,
    a while loop by an `Online` (`whiles/`).

    Attributes:
        slots: Where the primal stores carries, and in which form.
        reversal: How one block of steps is taken back.
        kept: The names of the values that a step keeps, see `Layout`.
        runner: What runs the loop in place of the engine, if anything does.
    """

    slots: AbstractSlots
    reversal: AbstractReversal
    kept: tuple[str, ...] | None
    runner: AbstractRunner | None = None

    @property
    def block(self) -> int:
        """How many steps are reversed at once, at the most."""
        return 1

    @property
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries."""
        return False

    @property
    @abc.abstractmethod
    def carries(self) -> int:
        """How many carries are stored on the device at once, at the most."""

    @property
    def steps_with_residuals(self) -> int:
        """For how many steps, the last ones, the primal stores their residuals."""
        return 0

    @property
    def reads_init(self) -> bool:
        """Whether the way back reads the initial carry among the loop's own inputs."""
        return False

    def by_carries(self) -> Self:
        """This layout for a loop whose primal can store carries, but no residuals."""
        return self

    def for_needs(self, step: Step, needs: Needs) -> "AbstractLayout":
        """This layout for a way back that reads only these leaves of carries.

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
        runner: What runs the loop in place of the engine, if anything does.
        why_left: Why the loop is left to the engine, if something else was to run it.
        is_for_gpu: Whether something else runs it on a GPU.

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
    runner: AbstractRunner | None = None
    why_left: str | None = dataclasses.field(default=None, compare=False, repr=False)
    is_for_gpu: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def block(self) -> int:
        """How many consecutive steps have their residuals stored together."""
        return self.order.block

    @property
    def carries(self) -> int:
        """How many carries are stored on the device at once, at the most."""
        slots, order = self.order.slots, self.order.of_carries
        if order is None or not self.is_elsewhere:
            return slots
        # Those that the primal stores are elsewhere, and one is fetched at a time.
        return slots - order.primal_slots + 1

    @property
    def is_elsewhere(self) -> bool:
        """Whether the primal stores carries somewhere else than on the device."""
        return not self.stores_residuals and self.slots != self.slots.near

    def bytes_elsewhere(self, cost: StepCost) -> int:
        """The bytes of stored carries that are not on the device.

        Args:
            cost: What a step costs, see `stored_cost`.

        Returns:
            Those of all slots there, of what steps save, and of one more row: loops
            also write the carries that are not kept, and these all go to that row.
        """
        if not self.is_elsewhere:
            return 0
        return self.slot_order.bytes_of_primal(cost)

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient that has no policy."""
        return self.order.evaluations + self._run_again

    @property
    def stores_residuals(self) -> bool:
        """Whether the primal stores residuals, and no carries."""
        return self.order.stores_residuals

    @property
    def slot_order(self) -> AbstractSlotOrder:
        """The order of a layout whose primal stores carries."""
        order = self.order.of_carries
        assert order is not None
        return order

    @property
    def steps_with_residuals(self) -> int:
        """For how many steps, the last ones, the primal stores their residuals."""
        return self.order.steps_with_residuals

    @property
    def steps_read_from_residuals(self) -> int:
        """How many steps are reversed from residuals that were stored before.

        They compute again what a policy does not keep.
        """
        in_blocks = self.block > 1 and self.reversal.stores_residuals
        is_stored = self.stores_residuals or in_blocks
        return self.order.length if is_stored else self.steps_with_residuals

    @property
    def _run_again(self) -> int:
        """How many steps are run once more before the way back."""
        # If slots do not last until the cotangents come, these are all whose carries
        # have to be stored.
        if self.slots.outlast_primal:
            return 0
        return self.order.length - self.steps_with_residuals

    @property
    def kind(self) -> Hashable:
        """What programs of similar layouts have in common.

        The memory that XLA was seen to use for one layout is a guide to the others of
        its kind.
        """
        return self.order.kind, self.reversal.kind, self.kept is None

    @property
    def pieces(self) -> frozenset[Piece]:
        """The pieces that its time is made up of."""
        return self.order.pieces(self.reversal)

    def stored_cost(self, cost: StepCost) -> StepCost:
        """The cost of a step whose carry is stored in the form of the slots.

        Args:
            cost: What a step costs.

        Returns:
            The same, with the bytes that a slot takes, and what a step saves.
        """
        of = lambda types: nbytes(self.slots.packed_types(types))
        held, saved = of(cost.held_types), of(cost.saved_types)
        return dataclasses.replace(cost, held=held, saved=saved)

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

    def reverse(self, sweep: Sweep, stored: "Stored", ct_carry: Arrays) -> Cotangents:
        """Goes back through the whole loop.

        Args:
            sweep: The way back.
            stored: What the primal has stored.
            ct_carry: What is carried back from the end of the loop.

        Returns:
            The cotangents of all inputs.
        """
        order, slots, runner = self.slot_order, stored.carries, self.runner
        ran = runner and runner.reverse(sweep, self, slots, ct_carry)
        if ran is not None:
            return ran
        # XLA makes a broadcast array anew, again and again, only within an outer loop.
        sweep = sweep if order.is_flat else sweep.opaque()
        cts = sweep.start(ct_carry, jax.tree.leaves(stored))
        step = sweep.step
        held = (True,) * step.num_carry  # the step has no other leaves by now
        saved = order.saved_of(step, held)
        carries = self.slots.holding(slots, step.carry_types, tuple(saved))
        return self.slots.released(slots, order.reverse(sweep, carries, cts))

    def duration(self, pace: Pace) -> float:
        """How long a gradient takes.

        Args:
            pace: How long its pieces take.

        Returns:
            Nanoseconds.
        """
        # What was seen comes from loops of many blocks, and so includes the start.
        start = 0.0 if pace.seen else self.reversal.start
        again = self._run_again * pace.advance
        run = again + self.order.duration(pace, self.reversal)
        return start + run

    def by_carries(self) -> Self:
        """This layout for a loop whose primal can store carries, but no residuals.

        Returns:
            A layout whose order is one of carries.
        """
        order = self.order.by_carries()
        # A step that is reversed by itself is run right before, and keeps its residuals
        # only until then. A policy would have it compute some of them a second time.
        kept = self.kept if order.block > 1 else None
        return dataclasses.replace(self, order=order, kept=kept)


_L = TypeVar("_L", bound=AbstractLayout, covariant=True)


class Stored(NamedTuple):
    """What a forward sweep leaves behind for the way back: arrays, or their types.

    Attributes:
        integers: How many steps the loop has run; and of one that stops, what its
            layout needs to find carries again.
        carries: The carries in slots, an array with a row for each slot per leaf.
        last: Leaves of the last carry.
        rows: The residuals of the last steps (`_primal.py`), if they are stored:
            arrays with a row for each of them.
    """

    integers: list[Value]
    carries: list[Value]
    last: list[Value]
    rows: list[Value]

    @classmethod
    def of(cls, integers: Sequence[Value] = (), carries: Sequence[Value] = ()) -> Self:
        """What a loop stores while it runs; nothing by default."""
        return cls(list(integers), list(carries), [], [])

    @property
    def flat(self) -> list[Value]:
        """All of it."""
        return [value for group in self for value in group]


@dataclasses.dataclass(frozen=True)
class Saves(Generic[_L]):
    """What a loop stores for its reversal.

    Attributes:
        layout: Which carries are stored, and where.
        needs: Which leaves of these carries, and of the last one.
    """

    layout: _L
    needs: Needs

    @property
    def held(self) -> Flags:
        """Which leaves of a carry the slots hold."""
        return self.needs.held

    @property
    def at_primal(self) -> Self | None:
        """What the primal stores: `None` if its slots do not outlast it."""
        return self if self.layout.slots.outlast_primal else None

    @property
    def given(self) -> Needs | None:
        """The leaves that the reverse sweep gets; `None` if it has to run the loop."""
        return self.needs if self.layout.slots.outlast_primal else None

    def of_last(self, carry: Sequence[Value]) -> list[Value]:
        """The leaves of the last carry that are stored."""
        final = self.needs.final
        # The carry may have more leaves at its start, see `lead`.
        return pick(carry[len(carry) - len(final) :], final)

    def of_these(self, stored: Stored, fewer: "Saves[AbstractLayout]") -> Stored:
        """The part of what was stored that is for a sweep with `fewer` leaves."""
        if self.at_primal is None:
            return stored
        (held, final), of = self.needs, fewer.needs
        return stored._replace(
            carries=pick(stored.carries, pick(of.held, held)),
            last=pick(stored.last, pick(of.final, final)),
        )

    def of_leaves(self, change: Callable[[Flags], Sequence[bool]]) -> Self:
        """What is stored after a change of the leaves of the carry."""
        return dataclasses.replace(self, needs=self.needs.changed(change))

    def with_leaves(self, count: int) -> Self:
        """What is stored of a carry that has so many more leaves at its end."""
        return self.of_leaves(lambda flags: (*flags, *[False] * count))
