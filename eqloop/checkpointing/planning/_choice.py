"""Chooses among the layouts of a loop: the fastest that fits, or the smallest."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ..engine.reversals._together import can_join
from ._measured_pace import is_quick, largeness
from ._memory import device_bytes, peak_bytes
from ._memory_guess import Guess
from ._paces import Paces, pace_for, pace_keeping
from ._search import layouts

# A search compiles programs until no layout promises to be so much faster than the one
# that was found, or this often. If the step is large and its loop is quick, programs
# take long to compile, and a few per cent of an estimate mean nothing.
WORTHWHILE, _WORTHWHILE_IF_LARGE = 0.97, 0.95
_MOST_TRIALS = 12
_HOPEFUL_TRIALS = 6

# The time of the fastest layout may depend on something that was not measured yet. Then
# that is measured, and the search is repeated, at most this often.
_MOST_ASKED = 3

# At most so many sets of the values that a step may keep are measured.
_MOST_MEASURED = 4


def best(problem: Problem, active: Active, nbytes: int, times: Paces) -> Layout | None:
    """The layout that takes the least time within so many bytes, if there is any.

    What a step takes that keeps this or that, or is given its products, is guessed from
    one that keeps nothing. So what seems to be the fastest is measured, until that is
    the fastest indeed.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        nbytes: How many bytes its gradient may take.
        times: How long the pieces of the gradient take, as far as that is known.
    """
    layout = fastest(problem, active, nbytes, times)
    if not times.base.is_measured:
        return layout
    # Products, and segments side by side. To measure takes a while, so it is done
    # only for a layout that would win.
    for _ in range(_MOST_ASKED):
        if layout is None:
            break
        own = pace_for(problem, active, layout, times.base)
        if own == times.base:
            break
        times = times.replaced(None, own)
        layout = fastest(problem, active, nbytes, times)
    known = set(times.sets[:1])
    for _ in range(_MOST_MEASURED):
        if layout is None or layout.kept is None or layout.kept in known:
            break
        known.add(layout.kept)
        own = pace_keeping(problem, active, layout.kept, times.base)
        times = times.replaced(layout.kept, own)
        layout = fastest(problem, active, nbytes, times)
    return layout


@functools.lru_cache(maxsize=128)
def fastest(
    problem: Problem, active: Active, nbytes: int, times: Paces
) -> Layout | None:
    """The layout that takes the least time within so many bytes, if there is any."""
    found = fastest_of(_by_duration(problem, times), problem, active, nbytes, times)
    if found is None:
        least = smallest(problem, active, times)
        fits = peak_bytes(problem, active, least, nbytes) <= nbytes
        return least if fits else None
    return found


def fastest_of(
    every: Sequence[tuple[float, Layout]],
    problem: Problem,
    active: Active,
    nbytes: int,
    times: Paces,
) -> Layout | None:
    """The fastest of some layouts that take so many bytes on the device, if any does.

    Args:
        every: The layouts, in the order of the times that they take.
        problem: The loop.
        active: Which of its inputs are differentiated.
        nbytes: How many bytes its gradient may take.
        times: How long the pieces of the gradient take.
    """
    # Branch and bound: to know the memory of a layout is to compile it, so as few as
    # possible are. The guess learns from each, and each that fits lowers the limit.
    guess = Guess(times)
    found: Layout | None = None
    left, limit = every, math.inf
    worthwhile = _worthwhile(problem, times)
    for turn in range(_MOST_TRIALS):
        promising = [(time, layout) for time, layout in left if time < limit]
        # What is fastest comes first, while there is hope that it fits: to be sure of
        # slower ones before would be to compile them, too.
        taken = guess.at_best if turn < _HOPEFUL_TRIALS else guess
        fitting = (item for item in promising if taken(item[1]) <= nbytes)
        layout = _with_fewest_nests(fitting, worthwhile)
        if layout is None:
            # The guess may be too high: compiling one of another kind will tell, unless
            # what it stores is too much already.
            others = [
                one
                for _, one in promising
                if not guess.knows_kind(one) and guess.counted(one) <= nbytes
            ]
            layout = min(others, key=guess, default=None)
        if layout is None:
            break
        time = next(time for time, one in left if one is layout)
        left = [item for item in left if item[1] != layout]
        if _bytes_learned(problem, active, layout, guess, nbytes) <= nbytes:
            found, limit = layout, worthwhile * time
    if found is None or not found.steps_with_residuals:
        return found
    # The room is filled up with residuals: by now it is known what those of a step
    # take, though not how many of them fit when the first was tried.
    alike = [one for _, one in every if one.kind == found.kind]
    more = alike[: alike.index(found)]
    fuller = next((one for one in more if guess(one) <= nbytes), found)
    fits = _bytes_learned(problem, active, fuller, guess, nbytes) <= nbytes
    return fuller if fits else found


def _worthwhile(problem: Problem, times: Paces) -> float:
    """How long a layout may take beside another that was found, to be compiled, too."""
    is_large = largeness(problem.step) > 1 and is_quick(problem, times.base)
    return _WORTHWHILE_IF_LARGE if is_large else WORTHWHILE


def _with_fewest_nests(
    fitting: Iterator[tuple[float, Layout]], worthwhile: float
) -> Layout | None:
    """Of layouts in the order of their time the first, or one like it.

    Each nest is a program of its own, and takes as long to compile as the others: here,
    and in the program of the user. So one that is hardly slower and has fewer of them
    is taken instead.

    Args:
        fitting: The layouts, with the times that they take.
        worthwhile: How long one takes beside another if it is worth a program more.
    """
    if (first := next(fitting, None)) is None:
        return None
    shortest, fastest = first
    alike = itertools.takewhile(lambda item: worthwhile * item[0] < shortest, fitting)
    same_kind = (layout for _, layout in alike if layout.kind == fastest.kind)
    return min((fastest, *same_kind), key=lambda layout: len(layout.order.levels))


@functools.lru_cache(maxsize=128)
def smallest(problem: Problem, active: Active, times: Paces) -> Layout:
    """The layout that takes the least memory; of equal ones the fastest."""
    guess = Guess(times)
    every = [layout for _, layout in _by_duration(problem, times)]
    # A block stores the residuals of its steps, so the smallest takes single steps.
    among = [layout for layout in every if layout.order.block == 1] or every
    least = min(among, key=guess)
    for _ in range(_MOST_TRIALS):
        if guess.knows(least):
            break
        _bytes_learned(problem, active, least, guess)
        least = min(among, key=guess)
    return least


def pareto(problem: Problem, active: Active, times: Paces) -> list[tuple[Layout, int]]:
    """The layouts that no other one beats in memory and in time, the smallest first.

    Returns:
        Each of them, with the bytes that it takes. One of every kind is compiled, and
        those of the others are told from it.
    """
    guess = Guess(times)
    least = smallest(problem, active, times)
    _bytes_learned(problem, active, least, guess)
    every = [layout for _, layout in _by_duration(problem, times)]
    chosen = _beaten_by_none(every, guess)
    for _ in range(_MOST_TRIALS):
        # What is learned of one kind changes what all of that kind are guessed to take,
        # and so who is beaten. The one in the middle is the nearest to most of them.
        unknown = [layout for layout in chosen if not guess.knows_kind(layout)]
        if not unknown:
            break
        _bytes_learned(problem, active, unknown[len(unknown) // 2], guess)
        chosen = _beaten_by_none(every, guess)
    floor = guess(least)
    larger = [layout for layout in chosen if guess(layout) > floor]
    return [(least, floor), *((layout, guess(layout)) for layout in larger[::-1])]


def _beaten_by_none(every: Iterable[Layout], guess: Guess) -> list[Layout]:
    # They come in the order of their time. So one is beaten if a layout before it is no
    # larger.
    chosen: list[Layout] = []
    least = math.inf
    for layout in every:
        if (size := guess(layout)) < least:
            chosen.append(layout)
            least = size
    return chosen


def _bytes_learned(
    problem: Problem,
    active: Active,
    layout: Layout,
    guess: Guess,
    within: int | None = None,
) -> int:
    """The bytes that a layout takes, from which others are guessed better."""
    size = device_bytes(problem, active, layout, within)
    guess.learn(layout, size)
    return size


@functools.lru_cache(maxsize=128)
def _by_duration(problem: Problem, times: Paces) -> Sequence[tuple[float, Layout]]:
    length, rows = problem.loop.length, times.base.cost.rows
    joins, products = can_join(problem.step), times.base.of_known is not None
    every = layouts(length, joins, rows, times.sets, products)
    if problem.as_run.loop.stops:
        # Which segments have all of their steps is not known, so none run side by side.
        single = (one.by_carries() for one in every if one.order.side_by_side == 1)
        every = iter(dict.fromkeys(single))
    return sorted(
        ((times.duration(layout), layout) for layout in every),
        key=lambda item: item[0],
    )
