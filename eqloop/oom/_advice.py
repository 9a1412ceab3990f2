"""What would take less memory, where it is known that it would."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from .._calls import format_bytes
from .._programs import Place
from ..checkpointing import JaxPlan, LoopPlan, Plan, Plans, StoreAll
from ._alive import Alive

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
    stored = [one for one in alive if one.kind == "stored" and not one.is_on_host]
    by_loop, outside = defaultdict[Place | None, int](int), 0
    for one in stored:
        if one.loop is not None:
            by_loop[one.loop.place] += one.nbytes
        else:
            outside += one.nbytes
    large = {at: size for at, size in by_loop.items() if size >= _MUCH * peak_bytes}
    found = list[tuple[int, str]]()
    for loop in () if plans is None or not large else plans():
        if loop.place in large and (text := _of_loop(loop)):
            found.append((large.pop(loop.place), text))
    for place, size in () if plans is not None else large.items():
        at = f"line {place.line}" if place else "an unknown line"
        text = f"the loop at {at} stores {format_bytes(size)}: el.plans says what it "
        found.append((size, text + "takes with a schedule"))
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
        sizes = map(format_bytes, (loop.plan.peak_bytes, other.peak_bytes))
        before, after = sizes
        return (
            f"el.Reschedule(loss, el.Recursive(16)), inside of the gradient, takes the "
            f"{where} from {before} to {after}"
        )
    if isinstance(loop.plan, Plan) and isinstance(loop.plan.schedule, StoreAll):
        return f"the {where} stores all residuals: give it a schedule"
    return None


def _donatable(alive: Sequence[Alive]) -> list[Alive]:
    """Inputs that outputs of the same type could overwrite."""
    outputs = [one for one in alive if one.kind == "output"]
    free = Counter((one.shape, one.dtype, one.nbytes) for one in outputs)
    found = list[Alive]()
    for one in alive:
        key = (one.shape, one.dtype, one.nbytes)
        if one.kind == "input" and not one.is_donated and free[key]:
            free[key] -= 1
            found.append(one)
    return found
