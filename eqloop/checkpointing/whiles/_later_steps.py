"""The first step of a loop, and all later ones.

Many a carry holds a flag that tells the first step from the others: a solver that uses
what the step before has evaluated has nothing to use there. After it the flag is known,
and so are branches that depend on it. Where the loop over the stages of a solver starts
is such a branch: once it is known, the stages can be written out, which XLA runs in a
third of the time. So the first step is run, and reversed, by itself.
"""

import dataclasses
import functools
from typing import NamedTuple

from ..._arrays import Arrays
from ..._programs import equations
from ..engine._short_loops import numbers_after, with_known, without_short_loops
from ..engine._step import Step
from ..engine._sweep import Sweep
from ._early_ends import leaned, with_early_ends
from ._while_layout import State, first_state, run_until


class Steps(NamedTuple):
    """The steps of a loop, for where they are only run; JAX cannot differentiate them.

    Attributes:
        first: The first one.
        later: Any other one. It is the very same if no more is known of it.
    """

    first: Step
    later: Step


@functools.lru_cache(maxsize=128)
def steps_to_run(step: Step) -> Steps:
    """The steps of a loop, with short loops written out if that decides branches."""
    lean = leaned(step)
    written = without_short_loops(lean)
    later = _later(written)
    has_fewer = _count_branches(written) < _count_branches(lean)
    first = written if has_fewer else with_early_ends(lean)
    return Steps(first, first if later is written else later)


def run_all(steps: Steps, consts: Arrays, init: Arrays, max_steps: int) -> State:
    """Runs a loop. Returns how many steps it ran, and the final carry."""
    state = first_state(init)
    if steps.later is not steps.first:
        state = run_until(steps.first, consts, state, 1)
    return run_until(steps.later, consts, state, max_steps)


class Sweeps(NamedTuple):
    """The way back past a first step, and past any other; see `Steps`."""

    first: Sweep
    later: Sweep


def sweeps_past(sweep: Sweep) -> Sweeps:
    """The way back past the steps of a loop, of which short loops are written out."""
    steps, back = steps_to_run(sweep.step), sweep.back.mapped(without_short_loops)
    first = dataclasses.replace(sweep, step=steps.first, back=back)
    back_later = back.mapped(_later)
    if steps.later is steps.first and back_later == back:
        return Sweeps(first, first)
    later = dataclasses.replace(sweep, step=steps.later, back=back_later)
    return Sweeps(first, later)


@functools.lru_cache(maxsize=128)
def _later(step: Step) -> Step:
    """The step as it is if there was one before; the same if that decides no branch."""
    if not _count_branches(step):
        return step
    later = with_known(step, numbers_after(step))
    return later if _count_branches(later) < _count_branches(step) else step


def _count_branches(step: Step) -> int:
    return sum(eqn.primitive.name == "cond" for eqn in equations(step.jaxpr))
