"""The way back past all steps but the first, of which more is known.

Many a carry holds a flag that tells the first step from the others: a solver that uses
what the step before has evaluated has nothing to use there. After it the flag is
known, and so are branches that depend on it.
"""

import dataclasses
import functools

from ..._equations import equations
from ..engine._short_loops import numbers_after, with_known
from ..engine._step import Step
from ..engine._sweep import Sweep


def past_later_steps(sweep: Sweep) -> Sweep:
    """A sweep past any step but the first; the very same if no more is known of them.

    Args:
        sweep: The sweep past all steps.
    """
    back = sweep.back.mapped(_later)
    return sweep if back == sweep.back else dataclasses.replace(sweep, back=back)


@functools.lru_cache(maxsize=128)
def _later(step: Step) -> Step:
    """The step as it is if there was one before; the same if that decides no branch."""
    if not _count_branches(step):
        return step
    later = with_known(step, numbers_after(step))
    return later if _count_branches(later) < _count_branches(step) else step


def _count_branches(step: Step) -> int:
    return sum(eqn.primitive.name == "cond" for eqn in equations(step.jaxpr))
