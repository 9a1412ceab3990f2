"""Chooses among the layouts of a loop: the fastest that fits, or the smallest."""

import functools
import math
from collections.abc import Sequence

from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ._cost import step_cost
from ._memory import peak_bytes, stored_bytes
from ._search import layouts
from ._time import duration
from ._work import rates


@functools.lru_cache(maxsize=128)
def fastest(problem: Problem, active: Active, nbytes: int) -> Layout | None:
    """The layout that takes the least time within so many bytes, if there is any."""
    cost = step_cost(problem, active)
    for layout in _by_duration(problem, active):
        # What is stored is known at once; for the rest a program may be compiled.
        if stored_bytes(cost, layout) > nbytes:
            continue
        if peak_bytes(problem, active, layout) <= nbytes:
            return layout
    return None


def smallest(problem: Problem, active: Active) -> Layout:
    """The layout that takes the least memory; of equal ones the fastest."""
    steps = (item for item in _by_duration(problem, active) if item.block == 1)
    layouts = list(steps) or list(_by_duration(problem, active))
    return min(layouts, key=lambda layout: peak_bytes(problem, active, layout))


def pareto(problem: Problem, active: Active) -> list[Layout]:
    """The layouts that no other one beats in memory and in time, the smallest first."""
    cost = step_cost(problem, active)
    chosen: list[Layout] = []
    least = math.inf
    for layout in _by_duration(problem, active):
        if stored_bytes(cost, layout) < least:
            size = peak_bytes(problem, active, layout)
            if size < least:
                chosen.append(layout)
                least = size
    return chosen[::-1]


@functools.lru_cache(maxsize=128)
def _by_duration(problem: Problem, active: Active) -> Sequence[Layout]:
    cost, rate = step_cost(problem, active), rates()
    return sorted(
        layouts(problem.loop.length), key=lambda layout: duration(cost, layout, rate)
    )
