"""What would take less memory, where it is known that it would."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .._calls import format_bytes
from .._compiled import Alive, LoopAt
from .._programs import Place
from ..checkpointing import JaxPlan, LoopPlan, Plan, Plans, StoreAll

# What is less than this part of the peak is not worth a word.
_MUCH = 1 / 20
# What is half of it, is worth another way of computing.
_WIDE = 1 / 2
_BY_ROWS = "el.Fit, or el.ChunkedVmap with a `reduce`, takes fewer rows at a time"


def advice(
    alive: Sequence[Alive],
    peak_bytes: int,
    plans: Callable[[], Plans] | None,
    has_fit: bool = False,
) -> Iterator[str]:
    """Sentences on what would take less, those that bring most first.

    `peak_bytes` is without inputs and outputs; `plans` finds the plans of the loops.
    """
    stored = [one for one in alive if one.kind == "stored" and not one.is_on_host]
    by_loop = Counter[LoopAt]()
    for one in stored:
        if one.loop is not None:
            by_loop[one.loop] += one.nbytes
    outside = sum(one.nbytes for one in stored if one.loop is None)
    large = {at: size for at, size in by_loop.items() if size >= _MUCH * peak_bytes}
    found, takes_cast = list[tuple[int, str]](), False
    if plans is None:
        for at, size in large.items():
            where = f"the loop at {_line(at)} stores {format_bytes(size)}"
            found.append((size, f"{where}: el.plans shows its plan, and others"))
    elif large:
        loops = {loop.place: loop for loop in plans()}
        known = [(n, loops[at.place]) for at, n in large.items() if at.place in loops]
        takes_cast = any(_takes_cast(loop.plan) for _, loop in known)
        found += [(size, text) for size, loop in known if (text := _of_loop(loop))]
    if outside and outside >= _MUCH * peak_bytes:
        how = "el.Fit, around what is differentiated, has computed again, or in parts"
        if has_fit:
            how = "el.Fit makes less with a smaller budget"
        text = f"{format_bytes(outside)} is stored outside of loops, which {how}"
        found.append((outside, text))
    wide = max(filter(_is_whole, alive), key=lambda one: one.nbytes, default=None)
    if wide is not None and wide.nbytes >= _WIDE * peak_bytes and not has_fit:
        text = f"{wide.type_in_words} at {_line(wide)} is whole at once: {_BY_ROWS}"
        found.append((wide.nbytes, text))
    elif text := _of_temporaries(alive, peak_bytes):
        found.append(text)
    double = sum(one.nbytes for one in stored if one.dtype == "float32")
    if double and double >= _WIDE * peak_bytes:
        text = f"{format_bytes(double)} of what is stored is float32: bfloat16 is half"
        text += ", for carries by el.Cast(schedule, jnp.bfloat16)" * takes_cast
        found.append((double // 2, text))
    if names := _donatable(alive):
        size = sum(one.nbytes for one in names)
        which = names[0].name + (f" and {len(names) - 1} more" if names[1:] else "")
        in_all = sum(one.nbytes for one in alive if not one.is_on_host)
        if size >= _MUCH * in_all:
            text = f"donating {which}, if not read later, can save {format_bytes(size)}"
            found.append((size, text))
    yield from (text for _, text in sorted(found, key=lambda pair: -pair[0]))


def _of_temporaries(alive: Sequence[Alive], peak_bytes: int) -> tuple[int, str] | None:
    """What makes less of values that come and go, if most of the peak are these."""
    of_peak = [one for one in alive if one.is_at_peak and one.kind == "temporary"]
    size = sum(one.nbytes for one in of_peak)
    if not size or size < _WIDE * peak_bytes:
        return None
    by_place = Counter[Place | None]()
    for one in of_peak:
        by_place[one.place] += one.nbytes
    first = max(of_peak, key=lambda one: by_place[one.place])
    how = _BY_ROWS
    if first.loop is not None:
        how = "el.Remat around a part of the step, or fewer examples in it, take less"
    where = f"temporary, most of it at {_line(first)}"
    return size, f"{format_bytes(size)} is {where}: {how}"


def short(place: Place) -> str:
    """A line without the folders of its file."""
    return f"{os.path.basename(place.file)}:{place.line} ({place.function})"


def _line(one: Alive | LoopAt | LoopPlan) -> str:
    return short(one.place) if one.place else "an unknown line"


def _of_loop(loop: LoopPlan) -> str | None:
    """What a schedule would bring for a loop, by its plans."""
    where = f"{loop.name} at {_line(loop)}"
    if isinstance(loop.plan, JaxPlan):
        if loop.plan.rule is not None:
            return f"what the {where} stores, its derivative rule says"
        other = loop.plan.rescheduled
        if other is None or other.peak_bytes >= loop.plan.peak_bytes:
            return None
        before, after = map(format_bytes, (loop.plan.peak_bytes, other.peak_bytes))
        how = "el.Reschedule(loss, el.Recursive(16)), inside of the gradient,"
        return f"{how} takes the {where} from {before} to {after}"
    if isinstance(loop.plan, Plan) and isinstance(loop.plan.schedule, StoreAll):
        return f"the {where} stores all residuals: give it schedule=el.Recursive(16)"
    return None


def _takes_cast(plan: object) -> bool:
    """Whether carries of a loop could be stored in a lower precision."""
    # A kernel stores its own, and an inverse begins with the very last one.
    if isinstance(plan, Plan):
        return plan.kernel is None and plan.schedule.undo is None
    return isinstance(plan, JaxPlan)


def _is_whole(one: Alive) -> bool:
    """Whether it is an array outside of loops that has rows, and comes and goes."""
    return one.is_at_peak and one.loop is None and len(one.shape) > 1


def _donatable(alive: Sequence[Alive]) -> list[Alive]:
    """Inputs that outputs of the same type could overwrite."""
    type_of = lambda one: (one.shape, one.dtype, one.nbytes)
    free = Counter(type_of(one) for one in alive if one.kind == "output")
    inputs = [one for one in alive if one.kind == "input" and not one.is_donated]
    free.subtract(map(type_of, reversed(inputs)))
    return [one for one in inputs if free[type_of(one)] >= 0]
