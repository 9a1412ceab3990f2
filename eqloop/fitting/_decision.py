"""Decides what each part of a function stores, and compiles the whole to see it."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import jax.extend.core as jex

from .._arrays import Flags, nbytes, pick
from .._calls import format_bytes, format_limit
from .._device import remembered_per_device
from .._programs import equations
from .._types import Aval
from ..checkpointing import key_of, recall, remember
from ._choice import Chosen, spread
from ._cut import Cut, advice, where_rows_meet
from ._options import Way
from ._remembered import as_text, from_text
from ._whole import WORTHWHILE, Decision, Whole

_T = TypeVar("_T")
# A choice of no whole, which takes forever.
_NOTHING: tuple[float, None, Chosen] = (math.inf, None, ())

# Whole gradients are compiled so often, at the most; once more before one is refused.
_MOST_COMPILED = 3
# A function of so few equations is compiled in a moment; of so few, it may be fused.
_QUICKLY_COMPILED, _FUSED = 256, 64
# The fastest is tried even if it is estimated to take so many times the budget, and so
# is what runs no part by rows.
_HOPEFUL = 1.3
# Before one is refused, so is what should take so many times the budget; and what does,
# if it should take such a part of the time of all that fits.
_HOPED, _FASTER = 2.0, 0.85
# What takes less memory stays in the caches of a processor.
_CACHED = 2**22
# What is faster within so much more memory is tried before one is refused. An error
# also says what more memory does, up to so much, if the time is this part then.
_LITTLE_MORE, _MUCH_MORE, _MUCH_FASTER = 1.1, 2.0, 0.75
# A frontier has no two plans whose memory differs by less.
_HARDLY_MORE = 1.01
# After a gradient that was too large, so much of the budget is left free.
_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class Limit:
    """What a gradient may take.

    Attributes:
        is_total: Whether inputs and outputs are among them.
        host: The bytes of carries that may be stored in the memory of the host.
    """

    nbytes: int
    is_total: bool
    host: int = 0

    def besides(self, types: Sequence[Aval], marks: Flags, outs: Sequence[Aval]) -> int:
        """What is left besides the inputs and outputs of a gradient."""
        if not self.is_total:
            return self.nbytes
        return self.nbytes - sum(map(nbytes, (types, pick(types, marks), outs)))


@remembered_per_device(maxsize=64)
def decided(
    program: jex.ClosedJaxpr,
    marks: Flags,
    limit: Limit,
    types: tuple[Aval, ...],
    split: bool,
) -> Decision:
    """Decides what each part of a function stores, and which are run by rows."""
    most = limit.besides(types, marks, program.out_avals)
    time = lambda decision: decision.choice.nanoseconds(decision.chosen)
    about = marks, types, limit.host, most
    wholes = [plain := Whole(Cut.of(program), *about)]
    fits = _simplest(plain, most)
    if not any(decision.is_fastest for decision in fits):
        if split:
            # Rows around single values are for what needs them: it takes longer.
            wholes += [Whole(Cut.of(program, "dimension"), *about, plain)]
            if plain.choice.within(most) is None:
                wholes += [Whole(Cut.of(program, "ranges"), *about, plain)]
            wholes = [one for one in wholes if one is plain or one.cut.has_rows]
        fits += _that_fit(wholes, most, fits)
    exactly = (one.whole.decision(one.chosen) for one in sorted(fits, key=time))
    best = next((one for one in exactly if one.peak_bytes <= most), None)
    if best is None:
        best = least = _least(wholes, limit, most)
        # What this takes tells more of what lies between it and what took too much.
        if (chosen := _chosen_next(least.whole, most)) is not None:
            faster = least.whole.decision(chosen)
            best = faster if faster.peak_bytes <= most else least
    best = _faster_if_leaner(best, wholes, most)
    if (text := as_text(best.ways)) is not None and best.is_compiled:
        key = _key_of_decision(program, marks, limit, types, split)
        remember({key: {"ways": text} | ({"seen": best.seen} if best.seen else {})})
    return best


def _simplest(plain: Whole, most: int) -> list[Decision]:
    """The plain gradient if it fits, or one that runs the whole function again."""
    # XLA may fuse straight code so that nothing of it is stored, which no estimate
    # foresees: distances of all pairs that are added up. If the value is wanted as
    # well, it keeps what both need, but not if the function is run again for the
    # gradient. If it is not wanted, that is the plain gradient.
    program, parts = plain.cut.program, plain.cut.parts
    count = sum(1 for _ in equations(program))
    has_others = any(part.loops or part.has_effects for part in parts)
    if count > _QUICKLY_COMPILED or has_others:
        return []
    if (found := plain.decision(plain.choice.fastest)).peak_bytes > most:
        if not found.is_compiled or count > _FUSED:
            return []
        whole = Whole(Cut.at_once(program), plain.marks, plain.types)
        found = whole.decision((1,))
    return [found] if found.peak_bytes <= most else []


class Recalled(NamedTuple):
    """What was decided for a function in an earlier process."""

    cut: Cut
    ways: tuple[Way, ...]
    seen: float | None


@remembered_per_device(maxsize=64)
def recalled(
    program: jex.ClosedJaxpr,
    marks: Flags,
    limit: Limit,
    types: tuple[Aval, ...],
    split: bool,
) -> Recalled | None:
    """What was decided for a function in an earlier process, if it still holds."""
    known = recall(_key_of_decision(program, marks, limit, types, split))
    ways = None if known is None else from_text(known["ways"])
    if known is None or ways is None:
        return None
    cut = Cut.run_by(ways, program)
    most = limit.besides(types, marks, program.out_avals)
    if not cut.takes(ways):
        return None
    size = Whole(cut, marks, types, limit.host).nbytes(ways)
    if size is None or size > most:
        return None
    return Recalled(cut, ways, known.get("seen"))


def _key_of_decision(*about: object) -> str:
    return key_of(("fit", *about))


def _that_fit(
    wholes: Sequence[Whole], most: int, fits: Sequence[Decision]
) -> list[Decision]:
    """Decisions that fit, besides others; not many are compiled to see that."""
    found, time = list[Decision](), lambda t: t.choice.nanoseconds(t.chosen)
    least = lambda: min(map(time, (*fits, *found)), default=math.inf)
    # What is estimated to be too large may fit.
    hoped = _fastest_of([(w, w.choice.within(_HOPED * most)) for w in wholes])
    for _ in range(_MOST_COMPILED):
        options = [(whole, _chosen_next(whole, most)) for whole in wholes]
        if not any(c for _, c in options) and not any(whole.tried for whole in wholes):
            # What is estimated may be too much. Then this tells how much.
            smallest = [(whole, whole.choice.smallest()) for whole in wholes]
            options = [min(smallest, key=lambda pair: pair[0].choice.peak(pair[1]))]
        duration, whole, chosen = _fastest_of(options)
        if found and hoped[0] < _FASTER * least():
            (duration, whole, chosen), hoped = hoped, _NOTHING
        if whole is None or duration > (1 - WORTHWHILE) * least():
            break
        last = whole.decision(chosen, is_exact=False)
        found += [last] if last.peak_bytes <= most else []
        if not last.is_compiled:
            break
    return found


def _fastest_of(
    options: Sequence[tuple[Whole, Chosen | None]],
) -> tuple[float, Whole | None, Chosen]:
    """What should be the fastest of some choices, with its time."""
    times = [(w.choice.nanoseconds(c), w, c) for w, c in options if c is not None]
    return min(times, key=operator.itemgetter(0), default=_NOTHING)


def _faster_if_leaner(best: Decision, wholes: Sequence[Whole], most: int) -> Decision:
    """A decision, or one that takes much less memory where that runs faster."""
    # Times of straight code are estimated, and what XLA makes of one that stores
    # nearly everything may be far slower than of one that runs much of it again, or by
    # rows.
    choice, chosen, plain = best.choice, best.chosen, wholes[0].choice
    loops = [part.is_loop for part in best.cut.parts]
    is_loops = choice.nanoseconds(chosen, loops) >= choice.nanoseconds(chosen) / 2
    peak, everything = choice.peak(chosen), plain.peak(plain.fastest)
    if best.peak_bytes < _CACHED or is_loops or 3 * peak < 2 * everything:
        return best
    within = lambda w: w.choice.within(peak / 4) or w.choice.within(peak / 2)
    _, whole, one = _fastest_of([(w, within(w)) for w in wholes])
    if whole is None or (other := whole.decision(one)).peak_bytes > most:
        return best
    factor = whole.time_over(one, best)
    if factor is None or factor > 1 - WORTHWHILE:
        return best
    return dataclasses.replace(other, seen=factor * best.relative_time)


def _chosen_next(whole: Whole, most: int) -> Chosen | None:
    """What should be the fastest that fits, unless it was tried; `None` if nothing."""
    choice, tried, limit = whole.choice, whole.tried, _estimate_for(most, whole.tried)
    if (chosen := choice.within(limit)) is None:
        smallest = choice.smallest()
        chosen = smallest if choice.peak(smallest) <= _HOPEFUL * limit else None
    if not tried and choice.peak(choice.fastest) <= _HOPEFUL * most:
        chosen = choice.fastest
    return None if any(chosen == t.chosen for t in tried) else chosen


def pinned(
    known: Recalled,
    program: jex.ClosedJaxpr,
    about: tuple[Flags, tuple[Aval, ...], int],
) -> Decision | None:
    """What was decided before; `None` if parts could not be run so any more."""
    compared = Whole(Cut.of(program), *about) if known.cut.has_rows else None
    whole = Whole(known.cut, *about, plain=compared)
    if not all(map(operator.contains, whole.ways, known.ways)):
        return None
    decision = whole.decision(tuple(map(list.index, whole.ways, known.ways)))
    return dataclasses.replace(decision, seen=known.seen)


def unbeaten(
    program: jex.ClosedJaxpr,
    marks: Flags,
    limit: Limit,
    types: tuple[Aval, ...],
    split: bool,
    count: int,
) -> tuple[list[Decision], Decision | None]:
    """Up to so many decisions, none of which takes more memory and time than another.

    They go from the least memory on. Also the one decided on, if one fits the limit.
    """
    about = marks, types, limit.host
    wholes = [plain := Whole(Cut.of(program), *about)]
    if split:
        for each in ("dimension", "ranges"):
            whole = Whole(Cut.of(program, each), *about, plain=plain)
            wholes += [whole] if whole.cut.has_rows else []
    estimated = [
        (whole.choice.peak(chosen), whole.choice.nanoseconds(chosen), (whole, chosen))
        for whole in wholes
        for chosen in whole.choice.spread(count)
    ]
    pairs = spread(_least_of_both(estimated), count)
    tried = [whole.decision(chosen) for whole, chosen in pairs]
    most = limit.besides(types, marks, program.out_avals)
    best = None
    if any(one.peak_bytes <= most for one in tried):
        best = decided(program, marks, limit, types, split)
        # Of the others that fit, only slower ones stay.
        fits = lambda one: one.peak_bytes <= most
        is_slower = lambda one: one.relative_time > best.relative_time
        tried = [best, *(one for one in tried if is_slower(one) or not fits(one))]
    both = [(one.peak_bytes, one.relative_time, one) for one in tried]
    found = _least_of_both(both)
    # For hardly any more memory one takes what is faster.
    pairs = itertools.zip_longest(found, found[1:])
    much_less = lambda one, more: _HARDLY_MORE * one.peak_bytes < more.peak_bytes
    is_worth = lambda one, more: more is None or one is best or much_less(one, more)
    return [one for one, more in pairs if is_worth(one, more)], best


def _least_of_both(items: Iterable[tuple[float, float, _T]]) -> list[_T]:
    """Those of which no other has less of both numbers, by the first of these."""
    found, least = list[_T](), math.inf
    for _, second, item in sorted(items, key=lambda item: item[:2]):
        if second < least:
            found.append(item)
            least = second
    return found


def _estimate_for(most: int, tries: Sequence[Decision]) -> float:
    """What a gradient may be estimated to take, if it is to take so many bytes."""
    if not tries:
        return most
    pairs = sorted((t.peak_bytes, t.choice.peak(t.chosen)) for t in tries)
    below = [pair for pair in pairs if pair[0] <= most]
    above = [pair for pair in pairs if pair[0] > most]
    if below and above:
        (low, at_low), (high, at_high) = below[-1], above[0]
        part = (most - low) / (high - low)
        return at_low + (1 - _MARGIN) * part * (at_high - at_low)
    if below:
        size, estimated = below[-1]
        return most + estimated - size
    # It may be off by so many bytes, or by such a factor. The larger one is tried.
    size, estimated = above[0]
    free = (1 - _MARGIN) * most
    return max(free + estimated - size, free * estimated / size)


def _least(wholes: Sequence[Whole], limit: Limit, most: int) -> Decision:
    """A decision that takes little memory, and fits."""
    # Which of them takes the least, only the compiler knows.
    smallest = [(whole, whole.choice.smallest()) for whole in wholes]
    smallest.sort(key=lambda pair: pair[0].choice.peak(pair[1]))
    for k, (whole, chosen) in enumerate(smallest):
        choice = whole.choice
        better = choice.faster(chosen, _LITTLE_MORE * choice.peak(chosen))
        for one in dict.fromkeys((chosen, better)):
            if k and choice.peak(one) > _HOPED * most and not whole.is_known(one):
                continue
            if (last := whole.decision(one)).peak_bytes <= most:
                return last
    # Nobody is refused what the plain gradient takes: on a TPU that may be less than by
    # any schedule, as what lies close to its cores is not counted.
    if (last := wholes[0].without_any()).peak_bytes <= most:
        return last
    _refuse([one for whole in wholes for one in whole.tried], limit, most)


def _refuse(tries: Sequence[Decision], limit: Limit, most: int) -> NoReturn:
    least = min(tries, key=lambda t: t.peak_bytes)
    exact = dataclasses.replace(least.whole, most=math.inf).nbytes(least.ways)
    least = dataclasses.replace(least, peak_bytes=exact or least.peak_bytes)
    # All of these were compiled to see whether they fit.
    larger = [t for t in tries if t.peak_bytes <= _MUCH_MORE * least.peak_bytes]
    time = lambda t: t.choice.nanoseconds(t.chosen)
    better = min(larger, key=lambda t: t.peak_bytes * time(t))
    peaks = least.choice.peaks(least.chosen)
    part = least.cut.parts[max(range(len(peaks)), key=peaks.__getitem__)]
    needed, more = (d.peak_bytes + limit.nbytes - most for d in (least, better))
    more_memory, whole = "", time(least)
    if (share := time(better) / (whole or math.inf)) < _MUCH_FASTER and whole:
        more_memory = (
            f" With {more} bytes it should take {share:.2g} times as long as with "
            f"that, for {100 * (more / needed - 1):.0f} % more memory."
        )
    said = least.whole.largest_of(least)
    largest = f" {said}" if said else ""
    meet = "".join({where_rows_meet(one.cut) for one in tries})
    inputs = ", inputs and outputs included," if limit.is_total else ""
    how = "" if least.is_compiled else ", by an estimate"
    what = "the loop" if part.is_loop else "what begins"
    raise ValueError(
        f"Fit: the gradient of this function does not fit into "
        f"{format_limit(limit.nbytes)}. It needs{inputs} at least "
        f"{format_bytes(needed)}, which is {needed} bytes{how}.{more_memory} Most is "
        f"taken on the way back through {what} at {part.place or 'an unknown line'}: "
        f"{advice(least.cut)}.{meet}{largest}"
    )
