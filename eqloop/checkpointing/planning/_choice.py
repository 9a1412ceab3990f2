"""Chooses among the layouts of a loop: the fastest that fits, or the smallest."""

import math
from collections.abc import Callable, Iterable, Sequence

from ..._device import remembered_per_device
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._pace import Piece
from ..engine._problem import Problem
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.reversals._together import can_join
from ._compile_times import compiles_slowly
from ._memory import device_bytes, peak_bytes
from ._memory_guess import Guess
from ._paces import Paces, tried
from ._search import layouts

# Of two layouts the one that runs fewer steps is taken if it is hardly slower: by so
# much, or by twice of what times were seen to scatter. So noise seldom decides.
_HARDLY, _AT_MOST = 0.03, 0.08

# To try a piece is to compile a program. It is done for a layout that promises to take
# less than this beside those of which all pieces were tried.
_PROMISING = 0.9

# A few per cent of an estimate mean nothing beside a program that is shorter.
_WORTHWHILE = 0.97

# A search compiles so many layouts at the most, of which the first few are hoped to fit
# rather than expected.
_MOST_TRIALS = 12
_HOPEFUL_TRIALS = 4
# Where each takes long to compile, it is the first that should fit, and one more if it
# does not. The smallest comes after these, and layouts that are hardly larger are as
# small as it.
_FEWEST_TRIALS = 2
_HARDLY_LARGER = 1.05
_ANY = 2**63


def best(
    problem: Problem, active: Active, nbytes: int, times: Paces
) -> tuple[Layout | None, Paces]:
    """The layout that takes the least time within `nbytes`, if there is any.

    It comes with the `times`, which now say all that was found out on the way.
    """
    # What the fastest one consists of is tried, until all is known of the one that is
    # the fastest then. The program of that one is compiled, to see whether it fits.
    times = _begun(problem, active, nbytes, times)
    checked: tuple[tuple[Layout, int], ...] = ()
    while len(checked) < (_FEWEST_TRIALS if times.compiles_slowly else _MOST_TRIALS):
        layout = _chosen(problem, nbytes, times, checked)
        if layout is None:
            # Nothing promises to fit. What the smallest takes may say that more will.
            least = smallest(problem, active, times)
            size = device_bytes(problem, active, least)
            if size > nbytes or any(layout == least for layout, _ in checked):
                break
            checked = (*checked, (least, size))
            continue
        if times.unknown(layout):
            times = tried(problem, active, times, [layout])
            continue
        size = device_bytes(problem, active, layout)
        checked = (*checked, (layout, size))
        if size <= nbytes:
            return layout, times
    least = smallest(problem, active, times)
    fits = peak_bytes(problem, active, least) <= nbytes
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
    first = [layout for _, layout in _heads(problem, nbytes, times, ())][:1]
    return tried(problem, active, times, [everything, *first])


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
    heads = _heads(problem, nbytes, times, checked)
    if not heads:
        return None
    # What nothing was seen of has to promise more.
    (hopeful, most), *_ = heads
    seen = [item for item in heads if not times.unknown(item[1])]
    if not seen or hopeful < _PROMISING * seen[0][0]:
        return most
    hardly = min(max(_HARDLY, 2 * times.base.scatter), _AT_MOST)
    alike = [layout for time, layout in seen if time <= (1 + hardly) * seen[0][0]]
    return min(alike, key=lambda one: (times.evaluations(one), times.stored_bytes(one)))


def _heads(
    problem: Problem,
    nbytes: int,
    times: Paces,
    checked: tuple[tuple[Layout, int], ...],
) -> list[tuple[float, Layout]]:
    """Of layouts of the same pieces the fastest that should fit, each with its time."""
    guess = Guess(times, checked)
    tried = {layout for layout, _ in checked}
    taken = guess.at_best if len(checked) < _HOPEFUL_TRIALS else guess
    groups: dict[tuple[frozenset[Piece], bool], tuple[float, Layout]] = {}
    for time, layout in _by_duration(problem, times.rounded):
        # What a step keeps is another program of the same piece: the fastest that keeps
        # chosen values says nothing of the fastest that stores all it has computed.
        alike = layout.pieces, layout.kept is None
        first, found = groups.get(alike, (time, None))
        # Each nest is a program of its own, and takes as long to compile as the others:
        # here, and in the program of the user. So of layouts that are alike, one that
        # is hardly slower and has fewer of them is taken instead.
        if found and (_WORTHWHILE * time > first or not _is_simpler(layout, found)):
            continue
        if layout not in tried and taken(layout) <= nbytes:
            groups[alike] = first, layout
    timed = ((times.duration(layout), layout) for _, layout in groups.values())
    return sorted(timed, key=lambda item: item[0])


def _is_simpler(layout: Layout, other: Layout) -> bool:
    fewer = len(layout.order.levels) < len(other.order.levels)
    return layout.kind == other.kind and fewer


def fastest_of(
    every: Sequence[tuple[float, Layout]],
    problem: Problem,
    active: Active,
    nbytes: int,
    times: Paces,
) -> Layout | None:
    """The first of some layouts that takes so many bytes on the device, if any does."""
    guess = Guess(times)
    for turn in range(_MOST_TRIALS):
        # What is fastest comes first, while there is hope that it fits: to be sure of
        # slower ones before would be to compile them, too.
        taken = guess.at_best if turn < _HOPEFUL_TRIALS else guess
        unseen = (one for _, one in every if not guess.knows(one))
        layout = next((one for one in unseen if taken(one) <= nbytes), None)
        if layout is None:
            break
        if _bytes_learned(problem, active, layout, guess) <= nbytes:
            return layout
    return None


@remembered_per_device(maxsize=128)
def smallest(problem: Problem, active: Active, times: Paces) -> Layout:
    """The layout that takes the least memory; of equal ones the fastest."""
    guess = Guess(times)
    every = [layout for _, layout in _by_duration(problem, times)]
    # A block stores the residuals of its steps, so the smallest takes single steps.
    among = [layout for layout in every if layout.order.block == 1] or every
    least = min(among, key=guess)
    if times.compiles_slowly:
        most = _HARDLY_LARGER * guess(least)
        return next(layout for layout in among if guess(layout) <= most)
    for _ in range(_MOST_TRIALS):
        if guess.knows(least):
            break
        _bytes_learned(problem, active, least, guess)
        least = min(among, key=guess)
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
    _bytes_learned(problem, active, least, guess)
    floor = guess(least)
    larger = [layout for layout in chosen if guess(layout) > floor]
    found = [(least, floor), *((layout, guess(layout)) for layout in larger[::-1])]
    return found, times


def simple_pareto(
    problem: Problem, active: Active, times: Paces
) -> tuple[list[Layout], Guess, Paces]:
    """The simple layouts that no other one beats, roughly, the smallest first.

    They come with what tells their bytes, and with the paces.
    """
    # What the whole takes is compiled later. The pieces of the layouts that promise the
    # most are tried once. Bytes are told from what these take, and from the smallest
    # that takes steps back in another way.
    every = _by_duration(problem, times)
    promising = _beaten_by_none((layout for _, layout in every), Guess(times))
    everything = Layout(AllAtOnce(problem.loop.length))
    times = tried(problem, active, times, [everything, *promising])
    timed = ((times.duration(one), one) for _, one in every if not times.unknown(one))
    known = [one for _, one in sorted(timed, key=lambda item: item[0])]
    guess = Guess(times)
    while not times.compiles_slowly:
        hopeful = _beaten_by_none(known, guess.at_best)
        unknown = [layout for layout in hopeful if not guess.knows_way_back(layout)]
        if not unknown:
            break
        _bytes_learned(problem, active, unknown[-1], guess)
    chosen = _beaten_by_none(known, guess)
    return chosen[::-1], guess, times


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
    problem: Problem,
    active: Active,
    layout: Layout,
    guess: Guess,
) -> int:
    """The bytes that a layout takes, from which others are guessed better."""
    size = device_bytes(problem, active, layout)
    guess.learn(layout, size)
    return size


@remembered_per_device(maxsize=128)
def _by_duration(problem: Problem, times: Paces) -> Sequence[tuple[float, Layout]]:
    every = layouts(problem.loop.length, can_join(problem.step), times.sets)
    if problem.as_run.loop.stops:
        every = iter(dict.fromkeys(one.by_carries() for one in every))
    few = filter(times.has_short_program, every)
    return sorted(
        ((times.duration(layout), layout) for layout in few),
        key=lambda item: item[0],
    )
