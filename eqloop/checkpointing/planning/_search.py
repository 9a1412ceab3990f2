"""The layouts among which a budget chooses: integers, of which nothing is run."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ..engine._layout import Layout
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.orders._first_and_last import FirstAndLast
from ..engine.orders._levels import Nest, nests
from ..engine.orders._nested import Nested
from ..engine.orders._order import AbstractOrder, AbstractSlotOrder
from ..engine.orders._revolved import Revolved
from ..engine.orders._segmented import Segmented
from ..engine.reversals._together import Together
from ..engine.slots._slots import AbstractSlots

# Orders that run each step more often than this are not offered: with a single slot, a
# loop of a million steps would take 10**12 evaluations.
MOST_ADVANCES = 100

# Neighbouring numbers of slots or of steps differ by so much.
_RATIO = 1.05

# A product of matrices gains little from more rows than this.
_LARGEST_BATCH = 128

# About how many steps the segments have where two levels are of two parts, and how many
# sizes of the second part are tried.
_SEGMENTS = (16, 32, 64)
_SHARES = 16

# Everything may be stored of so many parts of the steps. The orders for the others are
# tried with numbers of slots that differ by a ratio.
_PARTS, _COARSE = 32, 2.0

# Numbers of equal leaves, and of slots in each, differ by so much: there are all pairs
# of them.
_OF_LEAVES = 1.25


def orders(length: int) -> Iterator[AbstractOrder]:
    """The orders to choose from, over the whole range of trade-offs.

    They are not many, as neighbouring ones differ by some per cent.
    """
    # An order is only integers: all are compared before any is compiled.
    yield AllAtOnce(length)
    for block in blocks_to_try(length):
        yield from _nested_orders(length, block)
        yield from revolved(length, block)


def layouts(
    length: int, joins: bool, kept: Sequence[tuple[str, ...]] = ()
) -> Iterator[Layout]:
    """The layouts from which to choose, for a loop of so many steps.

    `joins`: whether steps can be reversed together; `kept`: what a step may keep.
    """
    for order in orders(length):
        yield Layout(order)
        if order.block > 1:  # and so residuals are stored
            yield from (Layout(order, kept=names) for names in kept)
        if joins:
            for size in _batches(order):
                yield Layout(order, reversal=Together(size))
    if joins:
        yield from _in_two_parts(length)
    yield from dict.fromkeys(_storing_last(length, joins, kept))


def layouts_in_two_places(
    length: int, joins: bool, slots: AbstractSlots, most: int
) -> Iterator[Layout]:
    """Layouts whose primal stores carries in `slots`, which have room for so many."""
    # What is stored while steps are run again stays on the device. So the layouts of
    # one place are layouts of two: the outermost level of nested ones is far, or all
    # slots of a `Revolved`. A third kind has equal leaves, each of which is reversed by
    # a `Revolved` on the device.
    for layout in layouts(length, joins):
        if not layout.stores_residuals:
            yield dataclasses.replace(layout, slots=slots)
    for order in _equal_leaves(length, most):
        yield Layout(order, slots)
        if joins and order.block > 1:
            yield Layout(order, slots, Together(order.block))


def _equal_leaves(length: int, most: int) -> Iterator[Segmented]:
    """Equal leaves, of which the first is shorter if there are steps left over."""
    counts = sizes(min(most, length), _OF_LEAVES)
    leaves = dict.fromkeys(-(-length // count) for count in counts)
    for each in leaves:
        count, over = divmod(length, each)
        for block in blocks_to_try(each):
            for leaf in revolved(each, block, _OF_LEAVES):
                first = Revolved(over, leaf.slots, min(block, over))
                yield Segmented((*([(1, first)] if over else []), (count, leaf)))


def _batches(order: AbstractOrder) -> Iterator[int]:
    """How many steps to reverse together: a whole block, or some of those stored."""
    if order.block > 1 and order.adjacent:
        yield order.block
        return
    yield from _batch_sizes(order.adjacent)


def _batch_sizes(steps: int) -> Iterator[int]:
    # Powers of two, or a number nearby that leaves no steps over.
    most = min(steps, _LARGEST_BATCH)
    sizes = [2**n for n in range(2, most.bit_length()) if 2**n <= most]
    yield from dict.fromkeys(dividing(steps, size) for size in sizes)


def dividing(length: int, size: int) -> int:
    """About as many steps, so that the batches leave none over, if that can be."""
    # Steps that are left over are reversed one by one. For that, the program would need
    # another loop.
    smaller = range(size, size // 2, -1)
    return next((n for n in smaller if length % n == 0), size)


def blocks_to_try(length: int) -> Iterator[int]:
    """Powers of two, up to a few times that for which slots are as many as steps."""
    block = 1
    while block <= min(length, max(64, 4 * math.isqrt(length))):
        yield block
        block *= 2


def revolved(length: int, block: int, ratio: float = _RATIO) -> Iterator[Revolved]:
    """Up to a slot for each block, and so many that no step is run too often."""
    blocks = -(-length // block)
    for slots in sizes(blocks, ratio):
        order = Revolved(length, slots, block)
        if order.advances <= MOST_ADVANCES * length:
            yield order


def _nested_orders(length: int, block: int) -> Iterator[AbstractOrder]:
    """One level, and up to four more within it, of unequal lengths."""
    blocks = length // block
    for inner in dict.fromkeys(_inner_levels(blocks)):
        outer = blocks // math.prod(inner)
        first = Nest((outer, *inner), block)
        # The levels may leave steps over, which get nests of their own.
        base = max(inner, default=2)
        order = Nested((first, *nests(length - first.length, base, block)))
        # Each nest is compiled by itself.
        if len(order.nests) <= 3:
            yield order


def _in_two_parts(length: int) -> Iterator[Layout]:
    """Two levels, and all carries of the last steps, as far as there is room."""
    for segment in dict.fromkeys(dividing(length, size) for size in _SEGMENTS):
        count, left = divmod(length, segment)
        # Left-over steps come first, so that the last segments, which are reversed
        # first, are whole.
        over = [Nest((left,))] if left else []
        for share in range(1, min(_SHARES, count)):
            # Of how many segments, the last ones, all carries are stored.
            last = count * share // min(_SHARES, count)
            first = Nest((count - last, segment))
            order = Nested((*over, first, Nest((last * segment,))))
            # A segment that is one batch keeps its products until it is reversed.
            yield Layout(order, reversal=Together(segment))


def _storing_last(
    length: int, joins: bool, kept: Sequence[tuple[str, ...]]
) -> Iterator[Layout]:
    """Layouts that store everything of the last steps, and not of the first ones."""
    parts = min(_PARTS, length)
    for share in range(1, parts):
        for order in _first_orders(length * share // parts):
            # Those that leave steps over have these stored, too.
            whole = FirstAndLast(order, AllAtOnce(length - order.length))
            yield Layout(whole)
            yield from (Layout(whole, kept=names) for names in kept)
            if joins and order.block == 1:
                sizes = _batch_sizes(order.adjacent)
                yield from (Layout(whole, reversal=Together(size)) for size in sizes)


def _first_orders(length: int) -> Iterator[AbstractSlotOrder]:
    """A few orders of about so many steps, over the whole range of trade-offs.

    All are nests of equal segments, so that one program runs the step, and slots.
    """
    yield Nested((Nest((length,)),))
    # The residuals of a block take the room that those of the last steps had. XLA sees
    # that if blocks are reversed in a loop, so there are at least two.
    for block in (*blocks_to_try(length // 2), length // 3, length // 2):
        if block > 1:
            yield Nested((Nest((length // block,), block),))
    for depth in (2, 3):
        size = round(length ** (1 / depth))
        if size > 1:
            inner = (size,) * (depth - 1)
            yield Nested((Nest((length // math.prod(inner), *inner)),))
    for slots in sizes(length // 2, _COARSE) if length > 1 else ():
        order = Revolved(length, slots)
        if order.advances <= length:
            yield order


def _inner_levels(length: int) -> Iterator[tuple[int, ...]]:
    """The levels within the first: about equal, if there are several.

    Those that leave no steps over are all among them, if they are one or two.
    """
    yield ()
    for depth in range(1, 5):
        for size in sizes(2 * round(length ** (1 / (depth + 1)))):
            inner = (size,) * depth
            if size > 1 and 2 * math.prod(inner) <= length:
                yield inner
    divisors = [n for n in range(2, math.isqrt(length) + 1) if length % n == 0]
    for inner in divisors:
        yield (inner,)
        for outer in divisors:
            if inner <= outer <= 4 * inner and length % (inner * outer) == 0:
                yield outer, inner


def sizes(most: int, ratio: float = _RATIO) -> Iterator[int]:
    """Numbers up to `most`, which is among them, each by a ratio above the last."""
    size = 1
    while size < most:
        yield size
        # Small numbers grow by one, where the ratio would add less.
        size = max(size + 1, round(size * ratio))
    yield most
