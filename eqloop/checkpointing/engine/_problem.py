"""A loop together with its schedule and policy, and what derivatives make of these.

The derivative of a loop is the loop of the step's derivative, and a loop under `vmap`
is the loop of the batched step. Each is a problem again. It keeps the schedule, which
makes a new plan for it: what fits in a `Budget` depends on the size of the batch, and
on what is differentiated.
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
    """What the engine asks of a schedule."""

    def layout(self, loop: "LoopSpec") -> Any:
        """Decides how a loop is stored and reversed.

        This is called when it is known which inputs are differentiated. The result is
        a layout that the loop's `repetition` can run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loop with its step, the policy for its residuals, and its schedule.

    Attributes:
        step: The step.
        loop: The loop around it.
        policy: Which residuals of a step may be stored.
        planner: The schedule.
        repetition: How the loop decides whether there is another step.
        still: For planning only: the leaves of the carry that vary, although their
            initial value is not differentiated. The sweep carries their cotangents, but
            the gradient does not return them. So XLA has no buffer of an output to keep
            them in, and the gradient takes that much more memory. Empty if none are.
        chooses_policy: For planning only: whether the schedule also chooses the policy.
    """

    step: Step
    loop: Loop
    policy: Saveable
    planner: Planner
    repetition: "AbstractRepetition[Any]"
    still: Flags = ()
    chooses_policy: bool = False

    @property
    def planned(self) -> "Problem":
        """The loop that the schedule is shown in place of this one.

        A scan that may end early is planned as one that runs all of its steps.
        """
        return self.repetition.planned(self)

    @property
    def run(self) -> "Problem":
        """The loop that runs by the plan of this one: the reverse of `planned`."""
        return self.repetition.run_as_planned(self)

    def layout(self, active: Active) -> Any:
        """The `AbstractLayout` that the schedule decides on."""
        if not is_symbolic(self.loop.length) and self.loop.length == 0:
            return Layout(AllAtOnce(0))  # so no schedule has to deal with length 0
        # A schedule may trace other loops to measure them; these are not the user's.
        with unlisted():
            return self.repetition.layout(self, active)

    @property
    def loop_back(self) -> Loop:
        """The loop for the way back, whose carry lacks the first `lead` leaves."""
        starts = self.loop.starts[self.repetition.lead :]
        return dataclasses.replace(self.loop, starts=starts)

    def under(self, layout: AbstractLayout) -> "Problem":
        """The same loop with the policy that a layout has chosen, if it chose one."""
        return self if layout.kept is None else self.keeping(layout.kept)

    def keeping(self, names: tuple[str, ...]) -> "Problem":
        """The same loop, with a policy that keeps the values of these names."""
        step = self.step.rewritten(with_named_dots)
        return dataclasses.replace(self, step=step, policy=KeptNames(names))

    def planned_for(self, active: Active, moves: Sequence[bool]) -> "Problem":
        """The same loop with its `still` leaves.

        Args:
            active: Which inputs are differentiated, and so which leaves vary.
            moves: Which leaves of the initial carry are differentiated.
        """
        still = tuple(a and not m for a, m in zip(active.carry, moves, strict=True))
        return dataclasses.replace(self, still=still if any(still) else ())

    def moving(self, active: Active) -> Active:
        """The differentiated inputs, without the leaves that are `still`."""
        if not self.still:
            return active
        moves = (a and not s for a, s in zip(active.carry, self.still, strict=True))
        return active._replace(carry=tuple(moves))

    def with_bars(self, change: BarChange) -> "Problem":
        """The same loop after a change of its bars, and of the bars in its step."""
        loop = dataclasses.replace(self.loop, meter=change.meter(self.loop.meter))
        return dataclasses.replace(self, step=self.step.rewritten(change), loop=loop)


def activity(step: Step, perturbed: PyTree) -> tuple[Active, Flags]:
    """Which inputs are differentiated, and which leaves of `y` then have a derivative.

    A leaf of the carry is active if it is perturbed at the start or at any later step.
    Types alone do not decide: what is under `stop_gradient` has no tangent.
    """
    types = (step.const_types, step.carry_types, step.x_types)
    # JAX marks integers as perturbed too, but they have no tangents.
    consts, carry, xs = map(inexact_only, perturbed, types)
    carry, ys = reaching(step, consts, carry, xs, is_derivative=True)
    return Active(consts, carry, xs), ys


def all_active(step: Step) -> Active:
    """The `Active` of a loop all of whose inputs are differentiated."""
    types = (step.const_types, step.carry_types, step.x_types)
    return activity(step, [[True] * len(group) for group in types])[0]


def settled_problem(problem: Problem, active: Active, reverse: bool) -> Problem:
    """The loop after it has been differentiated once: custom rules replace functions.

    See `settled`.
    """
    step = problem.step.rewritten(lambda j: settled(j, joined(active), reverse))
    return problem if step is problem.step else dataclasses.replace(problem, step=step)


def again(problem: Problem) -> Step:
    """The step that the way back runs again to get from a stored carry to later ones.

    It has no outputs, and no bars: the primal has shown these.
    """
    step = problem.step.rewritten(Again())
    return without_outputs(problem.repetition.reversed_step(step))


def gradient_back(problem: Problem, active: Active, wanted: Flags) -> Pull:
    """The backward step of a gradient.

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
    """The active inputs whose cotangents are not zero, given which outputs have one.

    The way back leaves the others out, as JAX does. This is not only quicker: if a leaf
    of the carry that nothing uses overflows, zero times infinity would be NaN.

    Args:
        step: The step.
        active: Which inputs are differentiated.
        carry: Which leaves of the final carry have a cotangent.
        ys: Which leaves of `y` have one.
    """

    def before(carry: Sequence[bool]) -> Active:
        """What a step reads to compute its marked outputs, if it is active."""
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
    """The leaves of each carry that a gradient has to store.

    Args:
        problem: The loop that is differentiated.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
        block: How many steps are reversed at once, at most.
    """
    # The way back runs the settled step, and differentiates the original one.
    step = again(settled_problem(problem, active, reverse=True))
    back = gradient_back(problem, active, wanted)
    return needs_of(back, step, problem.loop_back, block)


def tangent_problem(problem: Problem, active: Active, y_active: Flags) -> Problem:
    """The loop of the step's jvp.

    In each group (consts, carry, `xs` and `ys`) the tangents of the active leaves
    follow the leaves themselves.
    """
    step, loop = problem.step, problem.loop
    jaxpr = pushed(step.jaxpr, active, (active.carry, y_active))
    num_consts = step.num_consts + sum(active.consts)
    num_carry = step.num_carry + sum(active.carry)
    axes = (*loop.x_axes, *pick(loop.x_axes, active.xs))
    # By the chain rule: if `b(f(h)) = h`, then the jvp of `b` undoes the jvp of `f`.
    inverse = step.inverse and pruned(pushed(step.inverse, active, (active.carry,)))
    return dataclasses.replace(
        problem,
        step=Step(pruned(jaxpr), num_consts, num_carry, inverse),
        loop=dataclasses.replace(loop, x_axes=axes, meter=loop.meter.tangents),
    )


def batched_problem(
    problem: Problem, axis_data: BatchAxis, dims: PyTree
) -> tuple[Problem, Flags, Flags]:
    """The loop of the batched step.

    The step is batched, not the loops that run it. So the cotangent of a const that is
    not batched, a weight say, is one sum. `vmap` of a reverse sweep would carry one sum
    for each example, and add them up at the end.

    Args:
        problem: The loop.
        axis_data: The axis of the batch.
        dims: Where the consts, the initial carry and `xs` are batched. Consts and `xs`
            stay as they are; the carry of the result is batched along its first axis.

    Returns:
        The loop, and which leaves of its carry and of its `y` are batched.
    """
    step, loop = problem.step, problem.loop
    is_batched = [[dim is not None for dim in group] for group in dims]
    # A leaf of the carry that starts unbatched may become batched at a later step, so
    # it has to be batched from the start.
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
    """Which leaves of the carry and of `y` are batched by the step or by its inverse.

    The inverse may compute a leaf from others that the step does not use for it. Each
    of the two may add leaves, which the other one then starts from.
    """
    consts, _, x = is_batched
    assert step.inverse is not None
    back = Step(step.inverse, step.num_consts, step.num_carry)
    while True:
        before, _ = reaching(back, consts, carry, x, axis_name=axis_name)
        if before == carry:
            return carry, ys
        carry, ys = reaching(step, consts, before, x, axis_name=axis_name)
