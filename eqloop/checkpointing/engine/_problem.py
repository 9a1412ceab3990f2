"""A loop and how it is to be planned; and the same for the loop's derivatives.

The derivative of a loop is a loop again, of the step's derivative, and so is a loop
under `vmap`. They keep the schedule, and are planned anew.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..._axes import is_symbolic, refuse_symbolic
from ..._partition import Flags, pick
from ..._programs import batched, batched_axes, joined, pruned, pushed, settled
from ..._tangents import inexact_only
from ..._typecheck import PyTree
from ..._types import BatchAxis
from ...progress import Again, BarChange
from ._all_at_once import AllAtOnce
from ._back import Pull
from ._forward import Active, Saveable
from ._held import Needs, needs_of
from ._kept_names import KeptNames, with_named_dots
from ._layout import Layout
from ._listing import unlisted
from ._loop import Loop, nbytes
from ._reversals import ByResiduals
from ._segmented import Segmented
from ._short_sums import with_short_sums
from ._step import Step, reaching, without_outputs

if TYPE_CHECKING:
    from ._repetition import AbstractRepetition


class Planner(Protocol):
    """What the primitive needs of a schedule."""

    def layout(self, loop: "LoopSpec") -> Layout:
        """How to store and reverse a loop, once it is known what is differentiated."""
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loop with its step, the policy for its residuals, and who plans it.

    Attributes:
        step: The step.
        loop: The loop around it.
        policy: Which residuals of a step may be stored.
        planner: Who plans it.
        repetition: How it is decided whether there is another step.
        still: While the loop is planned, the leaves of the initial carry that are not
            differentiated, though the carry varies: their cotangents are no outputs of
            the gradient. Empty if there are none.
    """

    step: Step
    loop: Loop
    policy: Saveable
    planner: Planner
    repetition: "AbstractRepetition"
    still: Flags = ()

    @property
    def planned(self) -> "Problem":
        """The same loop, as whoever plans it sees it."""
        return self.repetition.planned(self)

    @property
    def run(self) -> "Problem":
        """The loop that is run where this one is planned."""
        return self.repetition.run_as_planned(self)

    def layout(self, active: Active) -> Layout:
        """How its planner has it stored and reversed."""
        if not is_symbolic(self.loop.length) and self.loop.length == 0:
            return Layout(AllAtOnce(0))  # no schedule has to think of it
        with unlisted():
            return self.repetition.layout(self, active)

    @property
    def loop_back(self) -> Loop:
        """The loop, with the `starts` of the leaves that the way back knows of."""
        starts = self.loop.starts[self.repetition.lead :]
        return dataclasses.replace(self.loop, starts=starts)

    def under(self, layout: Any) -> "Problem":
        """The same loop with the policy that a layout has chosen, if it has."""
        return self if layout.kept is None else self.keeping(layout.kept)

    def keeping(self, names: tuple[str, ...]) -> "Problem":
        """The same loop, where a step that is reversed keeps what has these names."""
        step = self.step.rewritten(with_named_dots)
        return dataclasses.replace(self, step=step, policy=KeptNames(names))

    def planned_for(self, active: Active, moves: Sequence[bool]) -> "Problem":
        """The same loop, to be planned for what of its initial carry is differentiated.

        Args:
            active: Which inputs are differentiated, and so which leaves vary.
            moves: Which leaves of the initial carry are differentiated.
        """
        still = tuple(a and not m for a, m in zip(active.carry, moves, strict=True))
        return dataclasses.replace(self, still=still if any(still) else ())

    def moving(self, active: Active) -> Active:
        """The inputs that are differentiated, without the leaves that are `still`."""
        if not self.still:
            return active
        moves = (a and not s for a, s in zip(active.carry, self.still, strict=True))
        return active._replace(carry=tuple(moves))

    def with_bars(self, change: BarChange) -> "Problem":
        """The same loop with other bars, and with such in its step."""
        loop = dataclasses.replace(self.loop, meter=change.meter(self.loop.meter))
        return dataclasses.replace(self, step=self.step.rewritten(change), loop=loop)


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """A loop to plan, as a schedule sees it.

    The library makes it, and passes it to the `layout` of a schedule.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.

    Examples:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> @dataclasses.dataclass(frozen=True)
        ... class AtMost(el.AbstractSchedule):
        ...     nbytes: int
        ...     def layout(self, loop: el.LoopSpec) -> el.Layout:
        ...         slots = self.nbytes // loop.slot_bytes
        ...         return loop.cut([(loop.length, el.Binomial(slots))])
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> scan = el.Scan(step, schedule=AtMost(10_000))
        >>> scan.plan(jnp.zeros(100), jnp.zeros((1000, 100))).slots
        26
    """

    # Not a part of the public types, which would be those of the whole engine.
    problem: Any = dataclasses.field(repr=False)
    active: Any = dataclasses.field(repr=False)

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        refuse_symbolic(
            type(self.problem.planner).__name__,
            self.problem.loop.length,
            "planning the gradient of a loop",
            "Use `schedule=el.StoreAll()`, or export for each length by itself",
        )
        return self.problem.loop.length

    @property
    def carry_bytes(self) -> int:
        """The bytes of a carry."""
        return nbytes(self.problem.step.carry_types)

    @property
    def slot_bytes(self) -> int:
        """The bytes that a slot takes: of a carry it holds what is read again."""
        return nbytes(pick(self.problem.step.carry_types, self._held))

    def cut(self, segments: Iterable[tuple[int, "Planner"]]) -> Layout:
        """The loop as segments, one after the other.

        The primal stores the carry at the start of each segment. On the way back, last
        segment first, each segment is run again from there, and reversed as its own
        schedule plans; a segment of one step is reversed at once. Equal segments that
        follow one another share one loop in the program. Steps are reversed together if
        all schedules have the same `block`.

        Args:
            segments: How many steps each segment has, and the schedule for it. With
                [`StoreAll`][eqloop.StoreAll] the residuals of the segment are stored
                together; with `Chunked(1)` each of its carries.

        Returns:
            What a schedule returns from `layout`.

        Raises:
            TypeError: If a number of steps is not an int, or a schedule is none.
            ValueError: If the segments do not add up to the loop, or one has an
                [`Offload`][eqloop.Offload], which is for the whole schedule.

        Examples:
            See [`AbstractSchedule`][eqloop.AbstractSchedule].
        """
        layouts = [self._layout_of(count, schedule) for count, schedule in segments]
        orders = [layout.order.as_part() for layout in layouts]
        owner = type(self.problem.planner).__name__
        if sum(order.length for order in orders) != self.length:
            lengths = ", ".join(str(order.length) for order in orders)
            raise ValueError(
                f"{owner}: the segments that are passed to `loop.cut` must add up to "
                f"the length of the loop, {self.length}, and they are: "
                f"{lengths or 'none'}."
            )
        parts = [(len(list(same)), order) for order, same in itertools.groupby(orders)]
        reversals = {layout.reversal for layout in layouts}
        reversal = reversals.pop() if len(reversals) == 1 else ByResiduals()
        return Layout(Segmented(tuple(parts)), reversal=reversal)

    def _layout_of(self, count: object, schedule: Any) -> Layout:
        """The layout of a segment, as its schedule plans it."""
        owner = type(self.problem.planner).__name__
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise TypeError(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps, an int of at least 1, and a schedule. Its number of steps is "
                f"{count!r}."
            )
        if not hasattr(schedule, "layout"):
            raise TypeError(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps and a schedule, such as `el.Chunked(1)`. Its schedule is "
                f"{schedule!r}."
            )
        loop = self.problem.loop.part(count)
        problem = dataclasses.replace(self.problem, loop=loop, planner=schedule)
        layout = problem.layout(self.active)
        if layout.slots != Layout(layout.order).slots:
            raise ValueError(
                f"{owner}: the slots of a segment are on the device, and cannot be "
                f"those of {schedule!r}. Pass the schedule within to `loop.cut`, and "
                f"wrap the whole one: `el.{type(schedule).__name__}({owner}(...))`."
            )
        return layout

    @property
    def has_policy(self) -> bool:
        """Whether residuals of the steps may be stored."""
        return self.problem.policy is not None

    @property
    def has_inverse(self) -> bool:
        """Whether there is an inverse of the step."""
        return self.problem.step.inverse is not None

    @property
    def has_slots(self) -> bool:
        """Whether there is anything to store: something of a carry is read again."""
        return any(self._held)

    @property
    def _held(self) -> Flags:
        step = self.problem.step
        _, y_active = activity(step, self.active)
        return needs_of_gradient(self.problem, self.active, y_active).held


def activity(step: Step, perturbed: PyTree) -> tuple[Active, Flags]:
    """Which leaves vary with the perturbed inputs: those of all inputs, and of `y`."""
    types = (step.const_types, step.carry_types, step.x_types)
    consts, carry, xs = map(inexact_only, perturbed, types)
    carry, ys = reaching(step, consts, carry, xs, is_derivative=True)
    return Active(consts, carry, xs), ys


def all_active(step: Step) -> Active:
    """What is differentiated if all inputs are."""
    types = (step.const_types, step.carry_types, step.x_types)
    return activity(step, [[True] * len(group) for group in types])[0]


def settled_problem(problem: Problem, active: Active, reverse: bool) -> Problem:
    """What is left of the loop when it has been differentiated, see `settled`."""
    step = problem.step.rewritten(lambda j: settled(j, joined(active), reverse))
    return problem if step is problem.step else dataclasses.replace(problem, step=step)


def again(problem: Problem) -> Step:
    """The step to advance by on the way back: all bars in it were shown there."""
    step = problem.step.rewritten(Again())
    return without_outputs(problem.repetition.reversed_step(step))


def gradient_back(problem: Problem, active: Active, wanted: Flags) -> Pull:
    """What the way back of a gradient does to a step.

    Args:
        problem: The loop that is differentiated.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
    """
    step = problem.repetition.reversed_step(problem.step.rewritten(Again()))
    carry = active.carry[problem.repetition.lead :]
    return Pull(step, problem.policy, active._replace(carry=carry), wanted)


def needs_of_gradient(
    problem: Problem, active: Active, wanted: Flags, block: int = 1
) -> Needs:
    """The leaves of the carries that a gradient saves.

    Args:
        problem: The loop that is differentiated.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
        block: How many steps are reversed at once, at most.
    """
    step = again(settled_problem(problem, active, reverse=True))
    back = gradient_back(problem, active, wanted)
    return needs_of(back, step, problem.loop_back, block)


def tangent_problem(problem: Problem, active: Active, y_active: Flags) -> Problem:
    """The loop of the step's jvp: leaves, then the tangents of active ones."""
    step, loop = problem.step, problem.loop
    jaxpr = pushed(step.jaxpr, active, (active.carry, y_active))
    num_consts = step.num_consts + sum(active.consts)
    num_carry = step.num_carry + sum(active.carry)
    axes = (*loop.x_axes, *pick(loop.x_axes, active.xs))
    inverse = step.inverse and pruned(pushed(step.inverse, active, (active.carry,)))
    return dataclasses.replace(
        problem,
        step=Step(pruned(jaxpr), num_consts, num_carry, inverse),
        loop=dataclasses.replace(loop, x_axes=axes, meter=loop.meter.tangents),
    )


def batched_problem(
    problem: Problem, axis_data: BatchAxis, dims: PyTree
) -> tuple[Problem, Flags, Flags]:
    """The loop of the step's vmap, with which leaves of carry and `y` it batches.

    To batch the step, and not the loops that run it, leaves one accumulator to the
    cotangents of an unbatched const. Inputs stay as they lie; the carry, and what is
    stacked of it, is batched along its leading axis.
    """
    step, loop = problem.step, problem.loop
    is_batched = [[dim is not None for dim in group] for group in dims]
    carry, ys = reaching(step, *is_batched, axis_name=axis_data.name)
    if step.inverse is not None:
        carry, ys = _reaching_both_ways(step, is_batched, carry, ys, axis_data.name)
    const_dims, _, xs_dims = dims
    axes, x_dims = batched_axes(loop.x_axes, xs_dims)
    front = lambda flags: [0 if flag else None for flag in flags]
    in_dims = (*const_dims, *front(carry), *x_dims)
    out_dims = (*front(carry), *front(ys))
    jaxpr = with_short_sums(batched(step.jaxpr, axis_data, in_dims, out_dims))
    inverse = step.inverse and pruned(
        batched(step.inverse, axis_data, in_dims, tuple(front(carry)))
    )
    problem = dataclasses.replace(
        problem,
        step=dataclasses.replace(step, jaxpr=pruned(jaxpr), inverse=inverse),
        loop=dataclasses.replace(loop, x_axes=axes, batch=loop.batch * axis_data.size),
    )
    return problem, carry, ys


def _reaching_both_ways(
    step: Step, is_batched: PyTree, carry: Flags, ys: Flags, axis_name: Hashable
) -> tuple[Flags, Flags]:
    """Which leaves of the carry, and of `y`, a step or its inverse batches."""
    consts, _, x = is_batched
    assert step.inverse is not None
    back = Step(step.inverse, step.num_consts, step.num_carry)
    while True:
        before, _ = reaching(back, consts, carry, x, axis_name=axis_name)
        if before == carry:
            return carry, ys
        carry, ys = reaching(step, consts, before, x, axis_name=axis_name)
