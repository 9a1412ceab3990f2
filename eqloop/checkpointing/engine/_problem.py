"""A loop and how it is to be planned; and the same for the loop's derivatives.

The derivative of a loop is a loop again, of the step's derivative, and so is a loop
under `vmap`. They keep the schedule, and are planned anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from ..._lists import Flags, pick, put
from ..._programs import batched, batched_axes, joined, pruned, pushed, settled
from ..._symbolic import refuse_symbolic
from ..._tangents import is_inexact
from ._forward import Active, Saveable
from ._layout import Layout
from ._loop import Loop
from ._step import Step, reaching


class Planner(Protocol):
    """What the primitive needs of a schedule."""

    def layout(self, problem: "Problem", active: Active) -> Layout:
        """How to store and reverse a loop, once it is known what is differentiated."""
        ...


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loop with its step, the policy for its residuals, and who plans it."""

    step: Step
    loop: Loop
    policy: Saveable
    planner: Planner

    @property
    def known_length(self) -> int:
        """The number of steps, for what is planned by it."""
        refuse_symbolic(
            type(self.planner).__name__,
            self.loop.length,
            "to plan the gradient of a loop",
            "Use `schedule=el.StoreAll()`, or export for each length by itself",
        )
        return self.loop.length

    def muted(self, backward: bool) -> "Problem":
        """The same loop to be run again: without its bars and those in its step.

        Args:
            backward: Whether those of backward sweeps are left out, too.
        """
        meter = self.loop.meter
        if meter is not None:
            meter = None if backward else meter.again
        loop = dataclasses.replace(self.loop, meter=meter)
        step = self.step.muted(backward)
        return dataclasses.replace(self, step=step, loop=loop)

    def guarded(self) -> "Problem":
        """The same with callbacks that close all bars when they raise."""
        return dataclasses.replace(self, step=self.step.guarded())


def activity(step: Step, perturbed: Any) -> tuple[Active, Flags]:
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


def tangent_problem(problem: Problem, active: Active, y_active: Flags) -> Problem:
    """The loop of the step's jvp: leaves, then the tangents of active ones."""
    step, loop = problem.step, problem.loop
    jaxpr = pushed(step.jaxpr, active, (active.carry, y_active))
    num_consts = step.num_consts + sum(active.consts)
    num_carry = step.num_carry + sum(active.carry)
    axes = (*loop.x_axes, *pick(loop.x_axes, active.xs))
    meter = loop.meter and loop.meter.tangents
    return dataclasses.replace(
        problem,
        step=Step(pruned(jaxpr), num_consts, num_carry),
        loop=dataclasses.replace(loop, x_axes=axes, meter=meter),
    )


def batched_problem(
    problem: Problem, axis_data: Any, dims: Any
) -> tuple[Problem, Flags, Flags]:
    """The loop of the step's vmap, with which leaves of carry and `y` it batches.

    To batch the step, and not the loops that run it, leaves one accumulator to the
    cotangents of an unbatched const. Inputs stay as they lie; the carry, and what is
    stacked of it, is batched along its leading axis.
    """
    step, loop = problem.step, problem.loop
    is_batched = [[dim is not None for dim in group] for group in dims]
    carry, ys = reaching(step, *is_batched, axis_name=axis_data.name)
    const_dims, _, xs_dims = dims
    axes, x_dims = batched_axes(loop.x_axes, xs_dims)
    front = lambda flags: [0 if flag else None for flag in flags]
    in_dims = (*const_dims, *front(carry), *x_dims)
    out_dims = (*front(carry), *front(ys))
    jaxpr = batched(step.jaxpr, axis_data, in_dims, out_dims)
    problem = dataclasses.replace(
        problem,
        step=dataclasses.replace(step, jaxpr=pruned(jaxpr)),
        loop=dataclasses.replace(loop, x_axes=axes),
    )
    return problem, carry, ys


# Lists of arrays in threes: consts, carry and xs, as `Active` marks them.


def select(groups: Any, active: Active) -> tuple[list[Any], ...]:
    """The leaves that are marked."""
    return tuple(pick(g, flags) for g, flags in zip(groups, active, strict=True))


def merge(groups: Any, active: Active, marked: Any) -> tuple[list[Any], ...]:
    """All leaves, with the marked ones replaced."""
    return tuple(
        put(g, flags, new) for g, flags, new in zip(groups, active, marked, strict=True)
    )


def inexact_only(flags: Sequence[bool], leaves: Sequence[Any]) -> Flags:
    """The marks of those leaves that can have a tangent."""
    return tuple(
        flag and is_inexact(leaf) for flag, leaf in zip(flags, leaves, strict=True)
    )
