"""Runs a loop under a schedule: what the loops of the library call."""

import functools
from typing import Any

from jax import lax

from .._effects import refuse_checks
from .._lists import Arrays
from .._weak_types import strongly_typed
from ..progress import Meter, Watched
from ._schedule import AbstractSchedule, StoreAll
from .engine._forward import Saveable, stored
from .engine._loop import Loop
from .engine._normal_form import normal_form
from .engine._primitive import planned_loop
from .engine._problem import Problem
from .engine._repetition import Counted
from .engine._step import Step, watch_step


def run(
    step: Step,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
    *,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: Saveable = None,
    meter: Meter | None = None,
) -> tuple[list[Any], list[Any]]:
    """Runs a step in a loop.

    Args:
        step: The step.
        consts: What the step gets each time.
        init: The initial carry.
        xs: What the step gets one element at a time of, along `loop.x_axes`.
        loop: The length and the direction of the loop.
        schedule: How it is to be differentiated.
        policy: Which residuals of a step may be stored, as `jax.checkpoint` has it.
        meter: Its progress bars, if it has any.

    Returns:
        The final carry, and every `y` stacked along a new leading axis.
    """
    if loop.length == 0:
        # All that is to be made are empty `ys`, of which nothing has a derivative.
        inputs = lax.stop_gradient((list(consts), list(init), list(xs)))
        return list(init), stored(step, loop, policy, *inputs)[1]
    # To cut `xs` up, as a derivative of JAX's own must, would copy them in the primal.
    if isinstance(schedule, StoreAll) and loop.kept is None and meter is None:
        return stored(step, loop, policy, consts, init, xs)
    watched = None if meter is None else Watched(meter)
    if watched is not None:
        step, init = watch_step(watched, step), watched.init(init)
    form = normal_form(step)
    refuse_checks(form.step.jaxpr.effects)
    problem = Problem(form.step, loop, policy, schedule, Counted())
    run_loop = functools.partial(planned_loop, problem)
    inputs = (*form.open(consts, init), list(map(strongly_typed, xs)))
    if watched is None:
        carry, ys = run_loop(*inputs)
        return form.close(consts, init, carry), ys
    carry, ys = watched.run(run_loop, *inputs)
    return watched.close(form.close(consts, init, carry)), ys
