"""A loop and how it is to be planned; and the same for the loop's derivatives.

The derivative of a loop is a loop again, of the step's derivative, and so is a loop
under `vmap`. They keep the schedule, and are planned anew.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..._arrays import Flags, closed_under, inexact_only, is_symbolic, pick, split
from ..._programs import (
    batched,
    batched_axes,
    inputs_read,
    joined,
    pruned,
    pushed,
    settled,
)
from ..._types import BatchAxis, PyTree
from ...progress import Again, BarChange
from ._backward_step import Pull
from ._forward import Active, Saveable
from ._kept_names import KeptNames, with_named_dots
from ._layout import AbstractLayout, Layout
from ._listing import unlisted
from ._loop import Loop
from ._short_sums import with_short_sums
from ._step import Step, reaching, without_outputs
from .leaves._needed_leaves import needs_of
from .leaves._saves import Needs
from .orders._all_at_once import AllAtOnce

if TYPE_CHECKING:
    from ._loop_spec import LoopSpec
    from ._repetition import AbstractRepetition


class Planner(Protocol):
    """What the primitive needs of a schedule."""

    def layout(self, loop: "LoopSpec") -> Any:
        """How to store and reverse a loop, once it is known what is differentiated.

        The layout is one that the loop's `repetition` runs by.
        """
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
    repetition: "AbstractRepetition[Any]"
    still: Flags = ()

    @property
    def planned(self) -> "Problem":
        """The same loop, as whoever plans it sees it."""
        return self.repetition.planned(self)

    @property
    def run(self) -> "Problem":
        """The loop that is run where this one is planned."""
        return self.repetition.run_as_planned(self)

    def layout(self, active: Active) -> Any:
        """How its planner has it stored and reversed: an `AbstractLayout`."""
        if not is_symbolic(self.loop.length) and self.loop.length == 0:
            return Layout(AllAtOnce(0))  # no schedule has to think of it
        with unlisted():
            return self.repetition.layout(self, active)

    @property
    def loop_back(self) -> Loop:
        """The loop, with the `starts` of the leaves that the way back knows of."""
        starts = self.loop.starts[self.repetition.lead :]
        return dataclasses.replace(self.loop, starts=starts)

    def under(self, layout: AbstractLayout) -> "Problem":
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
    """The step that the way back runs again, without bars: they have been shown."""
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


def with_cotangents(
    step: Step, active: Active, carry: Sequence[bool], ys: Sequence[bool]
) -> Active:
    """The active inputs that have a cotangent, if some outputs of the loop have one.

    The others are left out of the way back, as JAX does: their cotangents are zeros,
    and a zero that is multiplied with what has overflowed is not a number.

    Args:
        step: The step.
        active: Which inputs are differentiated.
        carry: Which leaves of the final carry have a cotangent.
        ys: Which leaves of `y` have one.
    """

    def before(carry: Sequence[bool]) -> Active:
        read = inputs_read(step.jaxpr, [*carry, *ys])
        groups = split(read, step.num_consts, step.num_carry)
        pairs = zip(groups, active, strict=True)
        return Active(*(tuple(r and a for r, a in zip(*p, strict=True)) for p in pairs))

    final = tuple(c and a for c, a in zip(carry, active.carry, strict=True))
    found = tuple(closed_under(final, lambda carry: before(carry).carry))
    return before(found)._replace(carry=found)


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
