"""Runs a loop under a schedule: what the loops of the library call."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._lists import Arrays
from ._engine import Policy, stored
from ._loop import Loop
from ._primitive import Problem, planned_loop
from ._schedule import AbstractSchedule, StoreAll
from ._step import Step


def run(
    step: Step,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
    *,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: Policy = None,
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

    Returns:
        The final carry, and every `y` stacked along a new leading axis.

    Raises:
        ValueError: If the loop cannot be run under the schedule.
    """
    schedule.check(loop)
    if isinstance(schedule, StoreAll) or not loop.length:
        return stored(step, loop, policy, consts, init, xs)
    problem = Problem(step, loop, policy, schedule)
    return planned_loop(problem, *([_strong(x) for x in g] for g in (consts, init, xs)))


def _strong(x: Any) -> Any:
    """Derivatives lose weak types, and the primitive must keep the types it has."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x
