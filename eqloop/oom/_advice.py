"""What would take less memory, where it is known that it would."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from .._calls import format_bytes
from .._compiled import Alive
from .._programs import Place
from ..checkpointing import JaxPlan, LoopPlan, Plan, Plans, StoreAll

# What is less than this part of the peak is not worth a word.
_MUCH = 1 / 20


def advice(
    alive: Sequence[Alive], peak_bytes: int, plans: Callable[[], Plans] | None
) -> Iterator[str]:
    """Sentences on what would take less, those that bring most first.

    Args:
        alive: What is alive.
        peak_bytes: What that takes besides inputs and outputs.
        plans: Finds the plans of the loops, where they are to be asked for.
    """
    by_loop, outside = Counter[Place | None](), 0
    for one in alive:
        if one.kind == "stored" and not one.is_on_host:
            if one.loop is not None:
                by_loop[one.loop.place] += one.nbytes
            else:
                outside += one.nbytes
    large = {at: size for at, size in by_loop.items() if size >= _MUCH * peak_bytes}
    found = list[tuple[int, str]]()
    if plans is None:
        for place, size in large.items():
            where = f"the loop at line {place.line if place else 'unknown'} stores "
            what = "el.plans shows its plan, and what others take"
            found.append((size, f"{where}{format_bytes(size)}: {what}"))
    elif large:
        texts = {loop.place: _of_loop(loop) for loop in plans()}
        known = ((size, texts.get(place)) for place, size in large.items())
        found += [(size, text) for size, text in known if text]
    if outside and outside >= _MUCH * peak_bytes:
        text = (
            f"{format_bytes(outside)} is stored outside of loops, which el.Fit, around "
            "what is differentiated, has computed again"
        )
        found.append((outside, text))
    if names := _donatable(alive):
        size = sum(one.nbytes for one in names)
        which = names[0].name + (f" and {len(names) - 1} more" if names[1:] else "")
        if size >= _MUCH * peak_bytes:
            text = f"donating {which}, if not read later, can save {format_bytes(size)}"
            found.append((size, text))
    for _, text in sorted(found, key=lambda pair: -pair[0]):
        yield text


def _of_loop(loop: LoopPlan) -> str | None:
    """What a schedule would bring for a loop, by its plans."""
    where = f"{loop.name} at line {loop.place.line if loop.place else 0}"
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
        return f"the {where} stores all residuals: give it a schedule"
    return None


def _donatable(alive: Sequence[Alive]) -> list[Alive]:
    """Inputs that outputs of the same type could overwrite."""
    type_of = lambda one: (one.shape, one.dtype, one.nbytes)
    free = Counter(type_of(one) for one in alive if one.kind == "output")
    inputs = [one for one in alive if one.kind == "input" and not one.is_donated]
    free.subtract(map(type_of, reversed(inputs)))
    return [one for one in inputs if free[type_of(one)] >= 0]
