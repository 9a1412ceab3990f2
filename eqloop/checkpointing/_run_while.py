"""Runs a loop of unknown length: what the while loops of the library call."""

import functools
from typing import Any

from .._effects import refuse_checks
from .._lists import Arrays
from ..progress import Meter, Watched
from .engine._loop import Loop
from .engine._normal_form import normal_form
from .engine._primitive import planned_loop
from .engine._problem import Problem
from .engine._step import Step, watch_step
from .whiles._bounded import Bounded
from .whiles._forward_only import Forward
from .whiles._online import Online
from .whiles._until_stopped import UntilStopped


def run_while(
    step: Step,
    consts: Arrays,
    init: Arrays,
    planner: Forward | Bounded | Online,
    meter: Meter | None = None,
) -> list[Any]:
    """Runs a step for as long as the first leaf of the carry says so.

    Args:
        step: The step; it has neither `x` nor `y`.
        consts: What it gets each time.
        init: The initial carry. Its first leaf, a boolean, says whether there is a
            first step; what each step makes of it, whether there is another.
        planner: How many steps there may be, and how they are differentiated.
        meter: Its progress bars, if it has any.

    Returns:
        The final carry.
    """
    if not planner.max_steps:
        return list(init)
    watched = None if meter is None else Watched(meter, at=1)
    if watched is not None:
        step, init = watch_step(watched, step), watched.init(init)
    form = normal_form(step)
    refuse_checks(form.step.jaxpr.effects)
    problem = Problem(form.step, Loop(planner.max_steps), None, planner, UntilStopped())
    run_loop = functools.partial(planned_loop, problem)
    inputs = (*form.open(consts, init), [])
    if watched is None:
        return form.close(consts, init, run_loop(*inputs)[0])
    carry, _ = watched.run(run_loop, *inputs)
    return watched.close(form.close(consts, init, carry))
