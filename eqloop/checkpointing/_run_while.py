"""Runs a loop of unknown length: what the while loops of the library call."""

from typing import Any

from .._lists import Arrays
from .engine._loop import Loop
from .engine._problem import Problem
from .engine._step import Step, strongly_typed
from .whiles._layout import Bounded, Forward, Online
from .whiles._primitive import planned_while


def run_while(
    step: Step, consts: Arrays, init: Arrays, planner: Forward | Bounded | Online
) -> list[Any]:
    """Runs a step for as long as the first leaf of the carry says so.

    Args:
        step: The step; it has neither `x` nor `y`.
        consts: What it gets each time.
        init: The initial carry. Its first leaf, a boolean, says whether there is a
            first step; what each step makes of it, whether there is another.
        planner: How many steps there may be, and how they are differentiated.

    Returns:
        The final carry.
    """
    problem = Problem(step, Loop(planner.max_steps), None, planner)
    # Derivatives lose weak types, and the primitive must keep the types that it has.
    consts, init = (list(map(strongly_typed, group)) for group in (consts, init))
    if not planner.max_steps:
        return init
    return planned_while(problem, consts, init)
