"""What derivatives and `vmap` make of a problem: each is a problem again."""

import dataclasses
from collections.abc import Hashable, Sequence

from ..._arrays import Flags, closed_under, inexact_only, pick, split
from ..._programs import (
    batched,
    batched_axes,
    inputs_read,
    joined,
    jvp_of,
    pruned,
    settled,
)
from ..._types import BatchAxis, PyTree
from ...progress import Again
from ..rewrites._short_sums import NOTE, with_short_sums
from ..steps._step import Step, reaching, without_outputs
from ._backward_step import BackwardStep
from ._forward import Active
from ._layout import AbstractLayout, Needs
from ._leaves import needs_of
from ._problem import Problem


def activity(step: Step, perturbed: PyTree) -> tuple[Active, Flags]:
    """Which inputs are differentiated, and which leaves of `y` then have a derivative.

    A leaf of the carry is active if it is perturbed at the start or at any later step.
    """
    # Types alone do not decide: what is under `stop_gradient` has no tangent.
    types = (step.const_types, step.carry_types, step.x_types)
    # JAX marks integers as perturbed too, but they have no tangents.
    consts, carry, xs = map(inexact_only, perturbed, types)
    # A fixed point: one leaf may make another one active, which makes a third one
    # active a step later.
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


def unsettled(problem: Problem) -> Problem:
    """The original of a loop, unless it has lost leaves of the carry since."""
    types = lambda problem: problem.step.jaxpr.in_avals
    original = problem.original or problem
    return original if types(original) == types(problem) else problem


def without_stored(problem: Problem) -> Problem:
    """The loop without what it stores for the way back of a gradient.

    Those are outputs of its step, see `Loop.stored`.
    """
    step, (_, leaves) = problem.step, problem.loop.stored
    if not leaves:
        return problem
    dropped = [i < leaves for i in range(len(step.y_types))]
    loop = dataclasses.replace(problem.loop, stored=(0, 0))
    return dataclasses.replace(problem, step=without_outputs(step, dropped), loop=loop)


def again(problem: Problem) -> Step:
    """The step that the way back runs again to get from a stored carry to later ones.

    It has no outputs, and no bars: the primal has shown these.
    """
    step = problem.step.rewritten(Again())
    return without_outputs(problem.reversed_step(step))


def gradient_back(problem: Problem, active: Active, wanted: Flags) -> BackwardStep:
    """The backward step of a gradient.

    `wanted` says which leaves of `y` have a cotangent.
    """
    # Not the settled step: `jax.vjp` has to find the custom rules in it.
    step = problem.reversed_step(problem.step.rewritten(Again()))
    carry = active.carry[problem.lead :]
    active = active._replace(carry=carry)
    return BackwardStep(step, problem.policy, active, wanted, problem.loop.sums)


def with_cotangents(
    step: Step, active: Active, carry: Sequence[bool], ys: Sequence[bool]
) -> Active:
    """The active inputs whose cotangents are not zero.

    `carry` says which leaves of the final carry have a cotangent, `ys` which of `y`.
    """
    # The way back leaves the others out, as JAX does. This is not only quicker: if a
    # leaf of the carry that nothing uses overflows, zero times infinity would be NaN.

    def before(carry: Sequence[bool]) -> Active:
        """What a step reads to compute its marked outputs, if it is active."""
        read = inputs_read(step.jaxpr, [*carry, *ys])
        groups = split(read, step.num_consts, step.num_carry)
        pairs = zip(groups, active, strict=True)
        return Active(*(tuple(r and a for r, a in zip(*p, strict=True)) for p in pairs))

    # From the end to the start: a leaf that a step reads for a leaf with a cotangent
    # has one itself before that step. Marks are only added, until none is new.
    final = tuple(c and a for c, a in zip(carry, active.carry, strict=True))
    found = tuple(closed_under(final, lambda carry: before(carry).carry))
    # `before` speaks of one step. A leaf that only the last carry has a cotangent of is
    # in `found` and may be missing there.
    return before(found)._replace(carry=found)


def needs_of_gradient(
    problem: Problem,
    active: Active,
    wanted: Flags,
    layout: AbstractLayout | None = None,
) -> Needs:
    """The leaves of each carry that a gradient has to store.

    Without a layout, its steps are taken to be reversed one by one.
    """
    # The way back runs the settled step, and differentiates the original one.
    step = again(settled_problem(problem, active, reverse=True))
    back = gradient_back(problem, active, wanted)
    if layout is None:
        return needs_of(back, step, problem.loop_back, carries=problem.carries)
    return needs_of(back, step, problem.loop_back, layout.block, layout.carries)


def tangent_problem(problem: Problem, active: Active, y_active: Flags) -> Problem:
    """The loop of the step's jvp: in each group, tangents of active leaves are last.

    The groups are consts, carry, `xs` and `ys`.
    """
    step, loop = problem.step, problem.loop
    # The step is differentiated, not the loop. So the tangents of the carry are leaves
    # of a carry, for which the schedule makes a plan.
    jaxpr = jvp_of(step.jaxpr, active, (active.carry, y_active))
    num_consts = step.num_consts + sum(active.consts)
    num_carry = step.num_carry + sum(active.carry)
    axes = (*loop.x_axes, *pick(loop.x_axes, active.xs))
    # By the chain rule: if `b(f(h)) = h`, then the jvp of `b` undoes the jvp of `f`.
    inverse = step.inverse and pruned(jvp_of(step.inverse, active, (active.carry,)))
    saved = step.saved and (*step.saved, *pick(step.saved, active.carry))
    paths = loop.carry_paths
    if len(paths) == step.num_carry:
        moving = pick(paths, active.carry)
        paths = (*paths, *(f"the tangent of {path}" for path in moving))
    meter = loop.meter.tangents
    return dataclasses.replace(
        problem,
        step=Step(pruned(jaxpr), num_consts, num_carry, inverse, saved),
        loop=dataclasses.replace(loop, x_axes=axes, carry_paths=paths, meter=meter),
        placed=(),
    )


def batched_problem(
    problem: Problem, axis_data: BatchAxis, dims: PyTree
) -> tuple[Problem, Flags, Flags]:
    """The loop of the batched step, and which leaves of its carry and `y` are batched.

    Consts and `xs` stay as they are; the carry is batched along its first axis.
    """
    # The step is batched, not the loops that run it. So the cotangent of a const that
    # is not batched, a weight say, is one sum. `vmap` of a reverse sweep would carry
    # one sum for each example, and add them up at the end.
    step, loop = problem.step, problem.loop
    is_batched = [[dim is not None for dim in group] for group in dims]
    # A leaf of the carry that starts unbatched may become batched at a later step, so
    # it has to be batched from the start.
    carry, ys = reaching(step, *is_batched, axis_name=axis_data.name)
    if step.inverse is not None:
        carry, ys = _reaching_both_ways(step, is_batched, carry, ys, axis_data.name)
    # Consts and `xs` stay where they are, as moving an axis would copy them; the loop
    # is told along which axis to index.
    const_dims, _, xs_dims = dims
    axes, x_dims = batched_axes(loop.x_axes, xs_dims)
    front = lambda flags: [0 if flag else None for flag in flags]
    in_dims = (*const_dims, *front(carry), *x_dims)
    out_dims = (*front(carry), *front(ys))
    plain = batched(step.jaxpr, axis_data, in_dims, out_dims)
    jaxpr = with_short_sums(plain)
    if jaxpr is not plain:
        loop = loop.noting(NOTE)
    inverse = step.inverse and pruned(
        batched(step.inverse, axis_data, in_dims, tuple(front(carry)))
    )
    original = unsettled(problem)
    if original is not problem:
        original, *_ = batched_problem(original, axis_data, dims)
    problem = dataclasses.replace(
        problem,
        step=dataclasses.replace(step, jaxpr=pruned(jaxpr), inverse=inverse),
        loop=dataclasses.replace(loop, x_axes=axes, batch=loop.batch * axis_data.size),
        placed=(),
        original=None if original is problem else original,
    )
    return problem, carry, ys


def _reaching_both_ways(
    step: Step, is_batched: PyTree, carry: Flags, ys: Flags, axis_name: Hashable
) -> tuple[Flags, Flags]:
    """Which leaves of the carry and of `y` the step or its inverse makes batched."""
    # The inverse may compute a leaf from others that the step does not use for it. Each
    # of the two may add leaves, which the other one then starts from.
    consts, _, x = is_batched
    assert step.inverse is not None
    back = Step(step.inverse, step.num_consts, step.num_carry)
    while True:
        before, _ = reaching(back, consts, carry, x, axis_name=axis_name)
        if before == carry:
            return carry, ys
        carry, ys = reaching(step, consts, before, x, axis_name=axis_name)
