"""Loops that are alike: what was found out about one of them holds for all.

A function that is traced again gives another program, and so do the equal layers of a
model, though all of them print the same. To differentiate a step and to compile its
loops takes long, so it is done for the first of them.
"""

import dataclasses
from typing import Any, NoReturn

from ..._arrays import Flags, is_inexact
from ..._device import remembered_per_device
from ..._programs import has_rules, joined, pulled
from ..engine._forward import Active
from ..engine._problem import Problem
from ..engine._step import Step


@dataclasses.dataclass(frozen=True)
class _NoPlanner:
    """Stands for the schedule of a loop, which makes no difference to what is asked."""

    def _decide(self, problem: Problem[Any], active: Active) -> NoReturn:
        raise AssertionError("what is asked does not depend on who plans the loop")


@remembered_per_device(maxsize=512)
def alike(problem: Problem, active: Active) -> Problem:
    """The loop by which all that are like this one are known.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.

    Returns:
        The same with a step that prints the same, and without who plans it. Its
        equations may be from other lines, and its leaves have other paths.
    """
    step = _known_step(problem.step, active)
    return dataclasses.replace(
        problem, step=step, planner=_NoPlanner(), chooses_policy=False
    )


@remembered_per_device(maxsize=512)
def _known_step(step: Step, active: Active) -> Step:
    programs = step.jaxpr, step.inverse
    types = tuple((*p.in_avals, *p.out_avals) for p in programs if p is not None)
    counts = step.num_consts, step.num_carry
    texts = *printed(step, active), str(step.inverse)
    return _first_printed(_PrintedStep(texts, types, counts, step.saved, step))


@remembered_per_device(maxsize=512)
def printed(step: Step, active: Active) -> tuple[str, ...]:
    """What there is to see of the program of a step, and of its derivative.

    A custom derivative prints nothing but its name. It may refuse inputs that are not
    differentiated.
    """
    texts = (str(step.jaxpr),)
    if not has_rules(step.jaxpr):
        return texts
    wanted = tuple(map(is_inexact, step.jaxpr.out_avals))
    return *texts, str(pulled(step.jaxpr, (joined(active),), (wanted,)))


@dataclasses.dataclass(frozen=True)
class _PrintedStep:
    """What there is to see of a step."""

    texts: tuple[str, ...]
    types: tuple[Any, ...]
    counts: tuple[int, int]
    saved: Flags
    step: Step = dataclasses.field(compare=False)


@remembered_per_device(maxsize=256)
def _first_printed(printed: _PrintedStep) -> Step:
    return printed.step
