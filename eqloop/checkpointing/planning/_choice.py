"""Chooses among the layouts of a loop: the fastest that fits, or the smallest."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from ..._device import remembered_per_device
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.orders._revolved import Revolved
from ..engine.reversals._together import can_join
from ._compile_times import compiles_slowly
from ._memory import device_bytes
from ._memory_guess import Guess
from ._paces import Paces, SecondPlace, tried, with_second_place
from ._search import layouts, layouts_in_two_places

# Of two layouts the one that runs fewer steps is taken if it is hardly slower: by so
# much, or by twice of what times were seen to scatter. So noise seldom decides.
_HARDLY, _AT_MOST = 0.03, 0.08

# To try a piece is to compile a program. It is done for a layout that promises to take
# less than this beside those of which all pieces were tried.
_PROMISING = 0.9

# A few per cent of an estimate mean nothing beside a program that is shorter.
_WORTHWHILE = 0.97

# A search compiles so many layouts at the most, of which the first two are hoped to fit
# rather than expected. More hope found nothing faster in 70 searches.
_MOST_TRIALS = 12
_HOPEFUL_TRIALS = 2
# Where each takes long to compile, it is the first that should fit, and one more if it
# does not. The smallest comes after these, and layouts that are hardly larger are as
# small as it.
_FEWEST_TRIALS = 2
_HARDLY_LARGER = 1.05
_ANY = 2**63


def best(
    problem: Problem,
    active: Active,
    nbytes: int,
    times: Paces,
    second: SecondPlace | None = None,
) -> tuple[Layout | None, Paces]:
    """The layout that takes the least time within `nbytes`, if there is any.

    It comes with the `times`, which now say all that was found out on the way.
    """
    # What the fastest one consists of is tried, until all is known of the one that is
    # the fastest then. The program of that one is compiled, to see whether it fits.
    times = _begun(problem, active, nbytes, times)
    times = with_second_place(problem, active, times, second)
    checked: tuple[tuple[Layout, int], ...] = ()
    while len(checked) < (_FEWEST_TRIALS if times.compiles_slowly else _MOST_TRIALS):
        layout = _chosen(problem, nbytes, times, checked)
        if layout is not None and times.unknown(layout):
            times = tried(problem, active, times, [layout])
            continue
        # If nothing promises to fit, what the smallest takes may say that more will.
        near = dataclasses.replace(times, far=None)
        looked_at = layout or smallest(problem, active, near)
        size = device_bytes(problem, active, looked_at)
        if layout is not None and size <= nbytes:
            return layout, times
        if layout is None and (size > nbytes or (looked_at, size) in checked):
            break
        checked = (*checked, (looked_at, size))
    least = smallest(problem, active, times)
    fits = device_bytes(problem, active, least) <= nbytes
    return (least if fits else None), times


def _begun(problem: Problem, active: Active, nbytes: int, times: Paces) -> Paces:
    """The paces of what is likely to be asked for, which is compiled side by side."""
    if times.compiles_slowly is None:
        # The first program tells what others would cost. It is the one that is needed
        # if they cost too much.
        alone = times.compiling(slowly=True)
        first = _chosen(problem, nbytes, alone, ()) or smallest(problem, active, alone)
        device_bytes(problem, active, first)
        # What cannot be compiled by itself takes no time.
        times = times.compiling(bool(compiles_slowly(problem.step, times.measure)))
    if not times.are_tried:
        return times
    # Storing everything, to which all is compared, and what promises to be the fastest.
    everything = Layout(AllAtOnce(problem.loop.length))
    first = _chosen(problem, nbytes, times, ())
    return tried(problem, active, times, [everything, first or everything])


@remembered_per_device(maxsize=256)
def _chosen(
    problem: Problem,
    nbytes: int,
    times: Paces,
    checked: tuple[tuple[Layout, int], ...],
) -> Layout | None:
    """The layout to look at next.

    `checked` is what was looked at before, with its bytes: it does not fit, or is slow.
    """
    guess = Guess(times, checked)
    taken = guess.at_best if len(checked) < _HOPEFUL_TRIALS else guess
    # Of layouts of the same pieces the fastest that should fit.
    groups: dict[Hashable, tuple[float, Layout]] = {}
    on_device = _by_duration(problem, dataclasses.replace(times, far=None).rounded)
    every = _by_duration(problem, times) if times.far else ()
    elsewhere = (item for item in every if item[1].is_elsewhere)
    for time, layout in itertools.chain(on_device, elsewhere):
        # What a step keeps is another program of the same piece: the fastest that keeps
        # chosen values says nothing of the fastest that stores all it has computed.
        alike = layout.pieces, layout.kept is None, layout.slots
        first, found = groups.get(alike, (time, None))
        # Each nest is a program of its own, and takes as long to compile as the others:
        # here, and in the program of the user. So of layouts that are alike, one that
        # is hardly slower and has fewer of them is taken instead.
        if found and (_WORTHWHILE * time > first or not _is_simpler(layout, found)):
            continue
        if not guess.knows(layout) and taken(layout) <= nbytes:
            groups[alike] = first, layout
    heads = sorted((one for _, one in groups.values()), key=times.duration)
    # What nothing was seen of has to promise more.
    seen = [layout for layout in heads if not times.unknown(layout)]
    if not seen or times.duration(heads[0]) < _PROMISING * times.duration(seen[0]):
        return heads[0] if heads else None
    hardly = min(max(_HARDLY, 2 * times.base.scatter), _AT_MOST)
    near = [layout for layout in seen if not layout.is_elsewhere]
    most = (1 + hardly) * min(map(times.duration, near), default=0.0)
    alike = [layout for layout in near if times.duration(layout) <= most]
    fewest = lambda layout: (times.evaluations(layout), times.stored_bytes(layout))
    far = (layout for layout in seen if layout.is_elsewhere)
    # Carries go elsewhere where that is faster.
    return min((*sorted(alike, key=fewest)[:1], *far), key=times.duration)


def _is_simpler(layout: Layout, other: Layout) -> bool:
    fewer = len(layout.order.levels) < len(other.order.levels)
    return layout.kind == other.kind and fewer


@remembered_per_device(maxsize=128)
def smallest(problem: Problem, active: Active, times: Paces) -> Layout:
    """The layout that takes the least memory; of equal ones the fastest."""
    if times.far is not None:
        near = smallest(problem, active, dataclasses.replace(times, far=None))
        length, slots = problem.loop.length, min(times.far.most, problem.loop.length)
        all_far = Layout(Revolved(length, slots), times.far.slots)
        return min(near, all_far, key=partial(device_bytes, problem, active))
    guess = Guess(times)
    every = [layout for _, layout in _by_duration(problem, times)]
    # A block stores the residuals of its steps, so the smallest takes single steps.
    among = [layout for layout in every if layout.order.block == 1] or every
    if times.compiles_slowly:
        most = _HARDLY_LARGER * min(map(guess, among))
        return next(layout for layout in among if guess(layout) <= most)
    while not guess.knows(least := min(among, key=guess)):
        _bytes_learned(problem, active, least, guess)
    return least


def pareto(
    problem: Problem, active: Active, times: Paces, hopeful: int
) -> tuple[list[tuple[Layout, int]], Paces]:
    """The layouts that no other one beats in memory and in time, the smallest first.

    So many as `hopeful` may be compiled because it is hoped that none beats them.
    """
    # One layout of every kind is compiled, and the bytes of the others are told from
    # it.
    times = _begun(problem, active, _ANY, times)
    guess = Guess(times)
    chosen = list[Layout]()
    for turn in range(_MOST_TRIALS + hopeful):
        every = [layout for _, layout in _by_duration(problem, times)]
        # A kind of which too much is expected would be beaten, and never be seen.
        taken = guess.at_best if turn < hopeful else guess
        chosen = _beaten_by_none(every, taken)
        if any(map(times.unknown, chosen)):
            times = tried(problem, active, times, chosen)
            continue
        # What is learned of one kind changes what all of that kind are guessed to take,
        # and so who is beaten. The one in the middle is the nearest to most of them.
        unknown = [layout for layout in chosen if not guess.knows_kind(layout)]
        if not unknown:
            break
        _bytes_learned(problem, active, unknown[len(unknown) // 2], guess)
    least = smallest(problem, active, times)
    floor = _bytes_learned(problem, active, least, guess)
    larger = [layout for layout in chosen if guess(layout) > floor]
    found = [(least, floor), *((layout, guess(layout)) for layout in larger[::-1])]
    return found, times


def simple_pareto(
    problem: Problem, active: Active, times: Paces, second: SecondPlace | None
) -> tuple[list[Layout], Guess, Paces]:
    """The simple layouts that no other one beats, roughly, the smallest first.

    Those in a second place are last. What tells their bytes comes with them, and paces.
    """
    # What the whole takes is compiled later. The pieces of the layouts that promise the
    # most are tried once. Bytes are told from what these take, and from the smallest
    # that takes steps back in another way.
    every = (layout for _, layout in _by_duration(problem, times))
    everything = Layout(AllAtOnce(problem.loop.length))
    promising = _beaten_by_none(every, Guess(times))
    times = tried(problem, active, times, [everything, *promising])
    times = with_second_place(problem, active, times, second)
    every = [one for _, one in _by_duration(problem, times) if not times.unknown(one)]
    near = [one for one in every if not one.is_elsewhere]
    guess = Guess(times)
    hopeful = lambda: _beaten_by_none(near, guess.at_best)
    while unknown := [one for one in hopeful() if not guess.knows_way_back(one)]:
        _bytes_learned(problem, active, unknown[-1], guess)
        if times.compiles_slowly:
            break  # one tells of steps that run much of themselves again
    fastest, *others = _beaten_by_none(near, guess)
    far = _beaten_by_none((one for one in every if one.is_elsewhere), guess)
    # No time is saved by moving what there is room for.
    slower = [one for one in far if times.duration(one) > times.duration(fastest)]
    return [*others[::-1], fastest, *slower], guess, times


def _beaten_by_none(
    every: Iterable[Layout], taken: Callable[[Layout], int]
) -> list[Layout]:
    # They come in the order of their time. So one is beaten if a layout before it is no
    # larger.
    chosen: list[Layout] = []
    least = math.inf
    for layout in every:
        if (size := taken(layout)) < least:
            chosen.append(layout)
            least = size
    return chosen


def _bytes_learned(
    problem: Problem, active: Active, layout: Layout, guess: Guess
) -> int:
    """The bytes that a layout takes, from which others are guessed better."""
    size = device_bytes(problem, active, layout)
    guess.learn(layout, size)
    return size


@remembered_per_device(maxsize=128)
def _by_duration(problem: Problem, times: Paces) -> Sequence[tuple[float, Layout]]:
    length, joins, far = problem.loop.length, can_join(problem.step), times.far
    every = layouts(length, joins, [kept for kept, _ in times.kept])
    if far is not None:
        of_two = layouts_in_two_places(length, joins, far.slots, far.most)
        every = itertools.chain(every, of_two)
    if problem.as_run.loop.stops:
        every = iter(dict.fromkeys(one.by_carries() for one in every))
    timed = ((times.duration(one), one) for one in every if times.offers(one))
    return sorted(timed, key=lambda item: item[0])
