"""Runs a loop under a schedule: what the loops of the library call."""

import dataclasses

from .._array_types import strongly_typed
from .._effects import has_checks, refuse_checks, without_derivatives
from .._partition import Arrays
from .._typecheck import PyTree
from .._types import Value
from ..progress import Guarded
from ._schedule import AbstractSchedule
from .engine._forward import Saveable, stored
from .engine._listing import is_listing
from .engine._loop import Loop
from .engine._normal_form import normal_form
from .engine._primitive import planned_loop
from .engine._problem import Problem
from .engine._repetition import Counted
from .engine._step import Step, with_bar
from .whiles._ending import Ending


def run_loop(
    step: Step,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
    *,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: Saveable = None,
) -> tuple[list[Value], list[Value]]:
    """Runs a step in a loop.

    Args:
        step: The step.
        consts: What the step gets each time.
        init: The initial carry.
        xs: What the step gets one element at a time of, along `loop.x_axes`.
        loop: The length and the direction of the loop.
        schedule: How it is to be differentiated.
        policy: Which residuals of a step may be stored, as `jax.checkpoint` has it.

    Returns:
        The final carry, and every `y` stacked along a new leading axis.
    """
    if loop.length == 0:
        # All that is to be made are empty `ys`, of which nothing has a derivative.
        inputs = without_derivatives((list(consts), list(init), list(xs)))
        loop = dataclasses.replace(loop, stops=False)
        return list(init), stored(step, loop, policy, *inputs)[1]
    # To cut `xs` up, as a derivative of JAX's own must, would copy them in the primal.
    is_plain = loop.kept is None and not (loop.meter.is_shown or loop.stops)
    is_by_jax = schedule._by_jax and is_plain
    # Where plans are listed, it has one like any other loop.
    if is_by_jax and (not is_listing() or has_checks(step.jaxpr.effects)):
        return stored(step, loop, policy, consts, init, xs)
    if loop.stops:
        return _run_until_stopped(step, (consts, init, xs), loop, schedule, policy)
    form = normal_form(step, keeps_carry=loop.meter.is_shown)
    refuse_checks(form.step.jaxpr.effects)
    loop = form.loop(loop)
    problem = Problem(form.step, loop, policy, schedule, Counted())
    if loop.meter.is_shown:
        problem = problem.with_bars(Guarded())
    inputs = form.open(consts, init)
    carry, ys = planned_loop(problem, *inputs, list(map(strongly_typed, xs)))
    return form.close(consts, init, carry), ys


def _run_until_stopped(
    step: Step, inputs: PyTree, loop: Loop, schedule: AbstractSchedule, policy: Saveable
) -> tuple[list[Value], list[Value]]:
    """Runs a loop that stops: its carry starts with whether it goes on, and a count."""
    (consts, init, xs), is_told = inputs, loop.meter.is_shown
    if is_told:
        step, init = with_bar(step, init, loop.meter)
        loop = dataclasses.replace(loop, starts=())
    form = normal_form(step, keeps_carry=is_told)
    refuse_checks(form.step.jaxpr.effects)
    # The number of the bar and its own count come before the count.
    repetition = Ending(count_at=3 if is_told else 1)
    loop = dataclasses.replace(loop, starts=form.starts(loop.starts))
    problem = Problem(form.step, loop, policy, schedule, repetition)
    strong = form.open(consts, init)
    carry, ys = planned_loop(problem, *strong, list(map(strongly_typed, xs)))
    carry = form.close(consts, init, carry)
    return [carry[0], *carry[3:]] if is_told else carry, ys
