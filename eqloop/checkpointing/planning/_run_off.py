"""Decides between layouts that seem to be about equally fast, by running them.

Short loops tell how long the pieces of a gradient take, and so which of hundreds of
layouts are fast. They do not tell how a whole gradient uses the caches, or what it
costs to touch memory for the first time. Of two layouts that seem equal, one may take
half as long again as the other. So the whole gradients of a few layouts are run, or
those of shorter loops with the same segments if the whole ones take long.
"""

import dataclasses

from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ..engine.orders._all_at_once import AllAtOnce
from ._cost import step_cost
from ._measured_pace import StepsAlone, known_times_of, largeness, times_of
from ._paces import Paces

# Gradients that take longer, in nanoseconds, or more bytes, are not run as a whole.
_QUICK = 1e8
_BYTES_TO_RUN = 2**26


def run_time(
    problem: Problem, active: Active, layout: Layout, times: Paces
) -> float | None:
    """How long the gradient of a loop takes when it is run, in nanoseconds.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        layout: How it is stored and reversed.
        times: How long the pieces of a gradient take.

    Returns:
        The time, or `None` if nothing is measured, or it would take too much.
    """
    if not times.base.is_measured or layout.kept is not None:
        return None
    # How far a loop that may stop runs depends on what it is given.
    if problem.as_run.loop.stops:
        return None
    if (longer := times.duration(layout) / _QUICK) > 1:
        return _time_if_shorter(problem, active, layout, times, longer)
    if not _has_room(problem, active, problem.loop.length):
        return None
    # Beside it is run what plans compare themselves with.
    layouts = [StepsAlone(), *_storing_everything(problem, active), layout]
    found = times_of(problem, active, layouts, problem.loop.length)
    return found[-1] if found else None


def _time_if_shorter(
    problem: Problem, active: Active, layout: Layout, times: Paces, longer: float
) -> float | None:
    """The same by a loop that is so many times shorter, with segments of equal size."""
    # Of a large step, each of these programs takes as long to compile as the gradient.
    if largeness(problem.step) > 1:
        return None
    length = problem.loop.length
    order = layout.order.shortened(max(round(length / longer), 1))
    if order is None or not _has_room(problem, active, order.length):
        return None
    shorter = dataclasses.replace(layout, order=order)
    found = times_of(problem, active, [StepsAlone(), shorter], order.length)
    if found is None:
        return None
    # The steps alone tell how fast the machine was at that moment.
    alone, whole = found
    return whole / alone * length * times.base.advance


def time_beside_everything(
    problem: Problem, active: Active, layout: Layout
) -> float | None:
    """How many times as long as storing everything it takes, if both were run."""
    everything = _storing_everything(problem, active)
    layouts = [layout, *everything]
    found = known_times_of(problem, active, layouts, problem.loop.length)
    if not everything or found is None:
        return None
    own, whole = found
    return own / whole


def _has_room(problem: Problem, active: Active, length: int) -> bool:
    """Whether inputs and their cotangents are small enough to be made up."""
    cost = step_cost(problem, active)
    return length * (cost.x + cost.ct_x + cost.ct_y) <= _BYTES_TO_RUN


def _storing_everything(problem: Problem, active: Active) -> list[Layout]:
    """The layout that stores all residuals, if there is room to run it."""
    layout = Layout(AllAtOnce(problem.loop.length))
    size = layout.stored_bytes(step_cost(problem, active))
    return [layout] * (size <= _BYTES_TO_RUN)
