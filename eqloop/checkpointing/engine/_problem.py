"""A loop together with its schedule and policy, and what derivatives make of these.

The derivative of a loop is the loop of the step's derivative, and a loop under `vmap`
is the loop of the batched step. Each is a problem again. It keeps the schedule, which
makes a new plan for it: what fits in a `Budget` depends on the size of the batch, and
on what is differentiated.

Problems differ in how the loop decides whether to run another step. A scan runs as many
steps as it is long: `Counted`. Other loops end when their carry says so (`whiles/`).
The two primitives are the same for all of them.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar

from jax.sharding import NamedSharding

from ..._arrays import Arrays, Flags, is_symbolic, pick
from ..._device import as_by_jit
from ..._programs import Formula
from ..._types import Aval, BatchAxis, PyTree, Value
from ...progress import BarChange
from ..steps._loop import Loop, count_type, zero
from ..steps._step import Step
from . import _forward
from ._backward_step import Back, BlockResult
from ._derived import two_scans
from ._forward import Active, Saveable
from ._kept_names import KeptNames, with_named_dots
from ._layout import AbstractLayout, AbstractRunner, Layout, Saves, Stored
from ._leaves import USUAL_CARRIES
from ._listing import unlisted
from ._sweep import Cotangents, Sweep
from .orders._all_at_once import AllAtOnce

# For arrays in groups, how each is split over devices, if that is known.
Placements: TypeAlias = tuple[tuple[NamedSharding | None, ...], ...]

# The layouts by which loops of one kind run.
L = TypeVar("L", bound=AbstractLayout)


class Planner(Protocol):
    """What the engine asks of a schedule."""

    @property
    def runner(self) -> AbstractRunner | None:
        """What runs a loop that is not differentiated, if not the engine."""
        ...

    def _decide(self, problem: "Problem[Any]", active: Active) -> Any:
        """Decides by which layout loops of this kind are stored and reversed.

        It is called when it is known which inputs are differentiated.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Problem(abc.ABC, Generic[L]):
    """A loop with its step, the policy for its residuals, and its schedule.

    All loops of one kind run by one kind of layout, `L`.

    Attributes:
        step: The step.
        loop: The loop around it.
        policy: Which residuals of a step may be stored.
        planner: The schedule.
        undifferentiated: For planning only: the leaves of the carry that vary, although
            their initial value is not differentiated. The sweep carries their
            cotangents, but the gradient does not return them. So XLA has no buffer of
            an output to keep them in, and the gradient takes that much more memory.
            Empty if none are.
        chooses_policy: For planning only: whether the schedule also chooses the policy.
        placed: For planning only: how the consts, the initial carry and `xs` are split
            over devices, in the order of these, where that is known and is not in their
            types. Empty if it is of none.
        carries: For planning only: how many carries are stored on the device at once,
            while no layout tells. What slots hold depends on it (`_row_lists.py`).
        original: While plans are listed: the loop before custom rules replaced
            functions in it, which is the one that is planned.
    """

    step: Step
    loop: Loop
    policy: Saveable
    planner: Planner
    undifferentiated: Flags = ()
    chooses_policy: bool = False
    placed: Placements = ()
    carries: int = USUAL_CARRIES
    original: "Problem[L] | None" = None

    # The advice in an error, where a callback keeps the loop from being reversed.
    instead_of_effects: ClassVar[str]
    # How many leaves at the start of the carry do not exist on the way back. A while
    # loop has one, its condition: the way back counts steps instead.
    lead: ClassVar[int]
    # Whether it may have `xs`, and so a row for each step.
    has_xs: ClassVar[bool] = True

    @property
    def own_leaves(self) -> int:
        """How many leaves at the start of the carry belong to the loop, not the user.

        They may not be left out, even if no output depends on them.
        """
        return self.lead

    # How it is run, there and back.

    @abc.abstractmethod
    def forward(
        self, saves: Saves[L] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], Stored]:
        """Runs the loop: the final carry, `ys`, and what is stored.

        `saves` (or `None`) says what that is; leaves of the last carry are left out.
        """

    @property
    def row_step(self) -> Step:
        """The step that runs if something else than the engine runs the loop."""
        return self.step

    def by_runner(
        self, saves: Saves[L] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]] | None:
        """What `AbstractRunner.forward` returns, if something runs the loop."""
        runner = self.planner.runner if saves is None else saves.layout.runner
        of_scan: Any = saves
        return runner and runner.forward(self.row_step, self.loop, of_scan, inputs)

    def evaluated(
        self, saves: Saves[L] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], Stored]:
        """What `forward` returns, with the leaves of the last carry that are stored."""
        carry, ys, stored = self.forward(saves, inputs)
        last = [] if saves is None else saves.of_last(carry)
        return carry, ys, stored._replace(last=last)

    @abc.abstractmethod
    def stored_types(self, saves: Saves[L]) -> Stored:
        """The types of what `forward` stores."""

    @abc.abstractmethod
    def reverse(
        self, sweep: Sweep, layout: L, stored: Stored, carried: Arrays
    ) -> Cotangents:
        """Goes back through the loop, past all steps that it may have.

        `carried` is what goes back from the end.
        """

    @abc.abstractmethod
    def reversed_step(self, step: Step) -> Step:
        """The step for the way back, without the leaves that `lead` counts."""

    @abc.abstractmethod
    def check(self, active: Active, inputs: PyTree) -> None:
        """Raises an error for what cannot be differentiated in reverse mode."""

    def batched_apart(
        self,
        formula: Formula,
        saves: Saves[L] | None,
        axis_data: BatchAxis,
        args: PyTree,
        dims: PyTree,
    ) -> tuple[Formula, PyTree, list[int | None]] | None:
        """The loop under `vmap`, see `Formula.batched`, if examples stop by themselves.

        `None` if all examples run as long: then it is the loop of the batched step.
        """
        return None

    @abc.abstractmethod
    def written_out(
        self, back: Back, step: Step, inputs: PyTree, ends: PyTree
    ) -> BlockResult:
        """A whole reverse sweep for JAX to differentiate, see `two_scans`.

        It is asked for if the backward step is not linear in what it carries back.
        """

    # How it is planned.

    def settings(self, **changes: Any) -> dict[str, Any]:
        """What loops of any kind have, the fields of this class, some of them new."""
        fields = (field.name for field in dataclasses.fields(Problem))
        return {name: vars(self)[name] for name in fields} | changes

    def layout(self, active: Active) -> Any:
        """The `AbstractLayout` that the schedule decides on: it is asked here alone."""
        if not is_symbolic(self.loop.length) and self.loop.length == 0:
            return Layout(AllAtOnce(0))  # so no schedule has to deal with length 0
        # A schedule may trace other loops to measure them; these are not the user's.
        planned = self.as_planned
        with as_by_jit(), unlisted():
            layout = planned.planner._decide(planned, active)
        # JAX cannot differentiate a loop that may end early in reverse mode, so the
        # primal cannot store residuals.
        return layout if planned is self else layout.by_carries()

    @property
    def as_planned(self) -> "Problem[Any]":
        """The loop that the schedule is shown in place of this one.

        A scan that may end early is planned as one that runs all of its steps.
        """
        return self

    @property
    def as_run(self) -> "Problem[Any]":
        """The loop that runs by the plan of this one: the reverse of `as_planned`."""
        return self

    @property
    def loop_back(self) -> Loop:
        """The loop for the way back, whose carry lacks the first `lead` leaves."""
        return dataclasses.replace(self.loop, starts=self.loop.starts[self.lead :])

    def under(self, layout: AbstractLayout) -> Self:
        """This loop with the policy that a layout has chosen, if it chose one."""
        return self if layout.kept is None else self.keeping(layout.kept)

    def keeping(self, names: tuple[str, ...]) -> Self:
        """This loop, with a policy that keeps the values of these names."""
        # A policy is asked about one equation at a time. It can tell two dots apart
        # only by their names.
        step = self.step.rewritten(with_named_dots)
        return dataclasses.replace(self, step=step, policy=KeptNames(names))

    def planned_for(self, active: Active, nonzeros: Sequence[bool]) -> Self:
        """This loop with its `undifferentiated` leaves.

        `nonzeros` says which leaves of the initial carry are differentiated.
        """
        undifferentiated = tuple(
            a and not m for a, m in zip(active.carry, nonzeros, strict=True)
        )
        return dataclasses.replace(
            self, undifferentiated=undifferentiated if any(undifferentiated) else ()
        )

    def moving(self, active: Active) -> Active:
        """The differentiated inputs, without the leaves that are `undifferentiated`."""
        if not self.undifferentiated:
            return active
        nonzeros = (
            a and not s
            for a, s in zip(active.carry, self.undifferentiated, strict=True)
        )
        return active._replace(carry=tuple(nonzeros))

    def with_bars(self, change: BarChange) -> Self:
        """This loop after a change of its bars, and of the bars in its step."""
        loop = dataclasses.replace(self.loop, meter=change.meter(self.loop.meter))
        return dataclasses.replace(self, step=self.step.rewritten(change), loop=loop)

    def in_lockstep(self) -> Self:
        """This loop in lockstep: no example of a batch stops by itself."""
        return self


@dataclasses.dataclass(frozen=True)
class Counted(Problem[Layout]):
    """A loop whose number of steps is known beforehand.

    Attributes:
        ending: For planning only: the scan that may end early, if the loop stands for
            one, which is planned as if it ran all of its steps.
    """

    ending: Problem[Layout] | None = None

    instead_of_effects: ClassVar[str] = (
        "Use `schedule=el.StoreAll()`, or no `chunk_size` for an `el.AssociativeScan`"
    )
    lead: ClassVar[int] = 0

    @property
    def as_run(self) -> Problem[Layout]:
        if self.ending is None:
            return self
        loop = dataclasses.replace(self.loop, stops=True)
        return dataclasses.replace(self.ending, **self.settings(loop=loop))

    def forward(
        self, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], Stored]:
        if (ran := self.by_runner(saves, inputs)) is not None:
            carry, ys, carries = ran
            counts = [] if saves is None else [zero() + self.loop.length]
            return carry, ys, Stored.of(counts, carries)
        # A loop whose reversal reads no leaf of the carry, a sum for example, has slots
        # without any arrays.
        if saves is None or not any(saves.held):
            reached = _forward.primal(self.step, self.loop, *inputs)
            counts = [] if saves is None else [reached.position]
            return reached.carry, reached.ys, Stored.of(counts)
        # The loop stops at each start of a segment for the slots to take the carry.
        # Within a segment it runs the step and writes nothing.
        order, held = saves.layout.slot_order, saves.held
        consts, init, xs = order.checked(self.step, self.loop, held, inputs)
        segments = order.in_segments(self.step, self.loop, consts, xs)
        reached, carries = saves.layout.slots.sweep(segments, held, init)
        return reached.carry, reached.ys, Stored.of([reached.position], carries)

    def stored_types(self, saves: Saves[Layout]) -> Stored:
        return Stored.of([count_type()], slot_types(self.step, saves))

    def reverse(
        self, sweep: Sweep, layout: Layout, stored: Stored, carried: Arrays
    ) -> Cotangents:
        return layout.reverse(sweep, stored, carried)

    def reversed_step(self, step: Step) -> Step:
        return step

    def check(self, active: Active, inputs: PyTree) -> None:
        """Nothing is refused."""

    def written_out(
        self, back: Back, step: Step, inputs: PyTree, ends: PyTree
    ) -> BlockResult:
        return two_scans(back, step, self.loop, inputs, ends)


def slot_types(step: Step, saves: Saves[Layout]) -> list[Aval]:
    """The types of the slots of a loop that stores carries at the starts of an order.

    The carry of the step has as many leaves as `saves` speaks of.
    """
    slots, order = saves.layout.slots, saves.layout.slot_order
    rows = slots.rows(len(order.starts), order.needs_spare)
    types, saved = pick(step.carry_types, saves.held), order.saved_of(step, saves.held)
    counts = [order.saved_rows if flag else rows for flag in saved]
    of_each = [slots.types([t], n) for t, n in zip(types, counts, strict=True)]
    return [aval for types in of_each for aval in types]
