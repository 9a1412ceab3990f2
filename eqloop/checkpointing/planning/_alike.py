"""Loops that are alike: what was found out about one of them holds for all.

A function that is traced again gives another program, and so do the equal layers of a
model, though all of them say the same (`_programs/_identity.py`). To differentiate a
step and to compile its loops takes long, so it is done for the first of them.
"""

import dataclasses
import functools
import weakref
from typing import Any, ClassVar, NoReturn

from ..._device import remembered_per_device
from ..._programs import digest_of
from ..engine._forward import Active
from ..engine._problem import Problem
from ..steps._step import Step

# The first of those steps that say the same, by what they say.
_steps = weakref.WeakValueDictionary[str, Step]()


@dataclasses.dataclass(frozen=True)
class _NoPlanner:
    """Stands for the schedule of a loop, which makes no difference to what is asked."""

    runner: ClassVar[None] = None

    def _decide(self, problem: Problem[Any], active: Active) -> NoReturn:
        raise AssertionError("what is asked does not depend on who plans the loop")


@remembered_per_device(maxsize=512)
def alike(problem: Problem) -> Problem:
    """The loop by which all that are like this one are known, without who plans it.

    Its step says the same, but may have equations from other lines and other paths.
    """
    step = _known_step(problem.step)
    return dataclasses.replace(
        problem, step=step, planner=_NoPlanner(), chooses_policy=False
    )


@functools.lru_cache(maxsize=512)
def _known_step(step: Step) -> Step:
    return _steps.setdefault(digest_of(step), step)
