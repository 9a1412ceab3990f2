"""What a gradient does, evaluation by evaluation: plain Python, no JAX.

It is the order in which the sweeps of the engine proceed, told for a picture.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..engine import _binomial
from ..engine._layout import Layout, Nested, Revolved, Stored
from ..engine._levels import Nest


class Event(NamedTuple):
    """One evaluation of the step, or its reversal with residuals that were stored.

    Attributes:
        kind: Whether the primal runs the step, or it is run again, or it is reversed.
            Without residuals a reversal evaluates the step as well.
        position: Which step.
        slots: How many carries are stored meanwhile.
        residuals: Of how many steps the residuals are stored.
    """

    kind: Literal["primal", "again", "reversal"]
    position: int
    slots: int
    residuals: int = 0


def history(layout: Layout) -> Iterator[Event]:
    """All that happens, in order."""
    if isinstance(layout, Stored):
        length = layout.length
        yield from (Event("primal", i, 0, i + 1) for i in range(length))
        yield from (Event("reversal", i, 0, i + 1) for i in reversed(range(length)))
        return
    starts = set(layout.starts)
    slots = 0
    for position in range(layout.length):
        slots += position in starts
        yield Event("primal", position, slots)
    if isinstance(layout, Revolved):
        yield from _revolved(layout)
    else:
        yield from _nested(layout)


def _nested(layout: Nested) -> Iterator[Event]:
    start, slots = layout.length, layout.primal_slots
    for nest in reversed(layout.nests):
        start -= nest.length
        yield from _level(nest, start, slots)
        slots -= nest.levels[0]


def _level(nest: Nest, start: int, slots: int) -> Iterator[Event]:
    """Reverses a nest whose outermost carries are the last of the slots."""
    count, *inner = nest.levels
    for segment in reversed(range(count)):
        position = start + segment * nest.stride
        if not inner:
            yield from _block(position, nest.block, slots)
        else:
            within = Nest(tuple(inner), nest.block)
            # All but the last segment are run for the carry that comes after.
            for offset in range(within.length - within.stride):
                filled = 1 + offset // within.stride
                yield Event("again", position + offset, slots + filled)
            yield from _level(within, position, slots + inner[0])
        slots -= 1


def _block(start: int, count: int, slots: int) -> Iterator[Event]:
    if count > 1:
        for offset in range(count):
            yield Event("again", start + offset, slots, offset + 1)
    for offset in reversed(range(count)):
        yield Event("reversal", start + offset, slots, offset + 1)


def _revolved(layout: Revolved) -> Iterator[Event]:
    segments = list(zip(layout.block_starts, layout.segments, strict=True))
    for row, (start, (length, rank)) in reversed(list(enumerate(segments))):
        yield from _chain(layout, start, length, rank, row + 1)


def _chain(
    layout: Revolved, start: int, length: int, rank: int, slots: int
) -> Iterator[Event]:
    """Reverses blocks of which the first one's carry is the last of the slots."""
    free = layout.primal_slots - slots + 1
    if length > 1 and free > 1:
        far = _binomial.split(length, free, rank)
        yield from _advance(layout, start, start + far, slots)
        yield from _chain(layout, start + far, length - far, rank, slots + 1)
        yield from _chain(layout, start, far, rank - 1, slots)
        return
    for block in reversed(range(start, start + length)):
        yield from _advance(layout, start, block, slots)
        begin, end = _position(layout, block), _position(layout, block + 1)
        yield from _block(begin, end - begin, slots)


def _advance(layout: Revolved, start: int, stop: int, slots: int) -> Iterator[Event]:
    for position in range(_position(layout, start), _position(layout, stop)):
        yield Event("again", position, slots)


def _position(layout: Revolved, block: int) -> int:
    return max(block * layout.block - layout.missing, 0)
