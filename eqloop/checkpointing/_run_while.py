"""Runs a loop of unknown length: what the while loops of the library call."""

import dataclasses

from .._effects import refuse_checks
from .._partition import Arrays
from .._types import Value
from ..progress import Meter
from .engine._loop import Loop
from .engine._normal_form import normal_form
from .engine._primitive import planned_loop
from .engine._problem import Problem
from .engine._step import Step, with_bar
from .whiles._bounded import Bounded
from .whiles._forward_only import ForwardOnly
from .whiles._online import Online
from .whiles._until_stopped import UntilStopped


def run_while(
    step: Step,
    consts: Arrays,
    init: Arrays,
    starts: tuple[int | None, ...],
    planner: ForwardOnly | Bounded | Online,
    meter: Meter,
) -> list[Value]:
    """Runs a step for as long as the first leaf of the carry says so.

    Args:
        step: The step; it has neither `x` nor `y`.
        consts: What it gets each time.
        init: The initial carry. Its first leaf, a boolean, says whether there is a
            first step; what each step makes of it, whether there is another.
        starts: The numbers that its leaves are, as far as they are known.
        planner: How many steps there may be, and how they are differentiated.
        meter: Its progress bars.

    Returns:
        The final carry.
    """
    if not planner.max_steps:
        return list(init)
    loop = Loop(planner.max_steps, meter=meter)
    if meter.is_shown:
        step, init = with_bar(step, init, meter)
        starts = ()
    form = normal_form(step, keeps_carry=meter.is_shown)
    loop = dataclasses.replace(loop, starts=form.starts(starts))
    refuse_checks(form.step.jaxpr.effects)
    problem = Problem(form.step, loop, None, planner, UntilStopped())
    carry, _ = planned_loop(problem, *form.open(consts, init), [])
    carry = form.close(consts, init, carry)
    return [carry[0], *carry[3:]] if meter.is_shown else carry
