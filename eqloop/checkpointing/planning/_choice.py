"""Chooses among the layouts of a loop: the fastest that fits, or the smallest."""

import functools
import math
from collections.abc import Iterable, Sequence

from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._pace import AbstractPace
from ..engine._problem import Problem
from ..engine._together import can_join
from ._cost import step_cost
from ._guess import Guess
from ._memory import peak_bytes
from ._search import layouts

# A search compiles programs until no layout promises to be so much faster than the one
# that was found, or this often.
_WORTHWHILE = 0.97
_MOST_TRIALS = 12


@functools.lru_cache(maxsize=128)
def fastest(
    problem: Problem, active: Active, nbytes: int, pace: AbstractPace
) -> Layout | None:
    """The layout that takes the least time within so many bytes, if there is any."""
    guess = _guess(problem, active)
    found: Layout | None = None
    left, limit = _by_duration(problem, pace), math.inf
    for _ in range(_MOST_TRIALS):
        promising = [layout for time, layout in left if time < limit]
        layout = next((one for one in promising if guess(one) <= nbytes), None)
        if layout is None:
            # The guess may be too high: compiling one of another kind will tell, unless
            # what it stores is too much already.
            others = [
                one
                for one in promising
                if not guess.knows_kind(one) and guess.counted(one) <= nbytes
            ]
            layout = min(others, key=guess, default=None)
        if layout is None:
            break
        left = [item for item in left if item[1] != layout]
        if _bytes_learned(problem, active, layout, guess) <= nbytes:
            found, limit = layout, _WORTHWHILE * layout.duration(pace)
    if found is None:
        least = smallest(problem, active, pace)
        return least if peak_bytes(problem, active, least) <= nbytes else None
    return found


@functools.lru_cache(maxsize=128)
def smallest(problem: Problem, active: Active, pace: AbstractPace) -> Layout:
    """The layout that takes the least memory; of equal ones the fastest."""
    guess = _guess(problem, active)
    every = [layout for _, layout in _by_duration(problem, pace)]
    among = [layout for layout in every if layout.order.block == 1] or every
    least = min(among, key=guess)
    for _ in range(_MOST_TRIALS):
        if guess.knows(least):
            break
        _bytes_learned(problem, active, least, guess)
        least = min(among, key=guess)
    return least


def pareto(
    problem: Problem, active: Active, pace: AbstractPace
) -> list[tuple[Layout, int]]:
    """The layouts that no other one beats in memory and in time, the smallest first.

    Returns:
        Each of them, with the bytes that it takes. One of every kind is compiled, and
        those of the others are told from it.
    """
    guess = _guess(problem, active)
    least = smallest(problem, active, pace)
    _bytes_learned(problem, active, least, guess)
    every = [layout for _, layout in _by_duration(problem, pace)]
    chosen = _beaten_by_none(every, guess)
    for _ in range(_MOST_TRIALS):
        unknown = [layout for layout in chosen if not guess.knows_kind(layout)]
        if not unknown:
            break
        _bytes_learned(problem, active, unknown[len(unknown) // 2], guess)
        chosen = _beaten_by_none(every, guess)
    floor = guess(least)
    larger = [layout for layout in chosen if guess(layout) > floor]
    return [(least, floor), *((layout, guess(layout)) for layout in larger[::-1])]


def _beaten_by_none(every: Iterable[Layout], guess: Guess) -> list[Layout]:
    """Of layouts in the order of their time those that take less than all before."""
    chosen: list[Layout] = []
    least = math.inf
    for layout in every:
        if (size := guess(layout)) < least:
            chosen.append(layout)
            least = size
    return chosen


def _guess(problem: Problem, active: Active) -> Guess:
    return Guess(step_cost(problem, active))


def _bytes_learned(
    problem: Problem, active: Active, layout: Layout, guess: Guess
) -> int:
    """The bytes that a layout takes, from which others are guessed better."""
    size = peak_bytes(problem, active, layout)
    guess.learn(layout, size)
    return size


@functools.lru_cache(maxsize=128)
def _by_duration(
    problem: Problem, pace: AbstractPace
) -> Sequence[tuple[float, Layout]]:
    length, rows = problem.loop.length, pace.cost.rows
    every = layouts(length, can_join(problem.step), rows)
    return sorted(
        ((layout.duration(pace), layout) for layout in every),
        key=lambda item: item[0],
    )
