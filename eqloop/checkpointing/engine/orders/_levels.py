"""Nested checkpointing: how to cut a loop into levels, in plain Python, no JAX.

A nest of levels `(n1, n2, ..., nk)` runs `n1 * n2 * ... * nk` blocks. The primal stores
`n1` carries, at equal distances. The reverse sweep takes the segments between them last
to first, runs each of them again to store `n2` carries within it, and so on down. All
trip counts are static. The levels `(3, 2, 2)`, while the last segment is reversed:

    |               |               |                stored by the primal
                                    |       |        stored by the first rerun
                                            |   |    stored by the second
    0   1   2   3   4   5   6   7   8   9  10  11
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from math import ceil, log, prod


@dataclasses.dataclass(frozen=True)
class Nest:
    """Consecutive steps that are cut into equal segments, level by level.

    Attributes:
        levels: How many segments each level has, the outermost first.
        block: How many steps an innermost segment has. Their residuals are stored
            together.
    """

    levels: tuple[int, ...]
    block: int = 1

    @property
    def length(self) -> int:
        return prod(self.levels) * self.block

    @property
    def stride(self) -> int:
        """How many steps a segment of the outermost level has."""
        return self.length // self.levels[0]

    @property
    def within(self) -> "Nest":
        """A segment of the outermost level, which has at least one more level."""
        return dataclasses.replace(self, levels=self.levels[1:])


def nests(length: int, base: int, block: int = 1) -> tuple[Nest, ...]:
    """Levels of about `base` segments each, for any length.

    The few steps that are left over are a nest of their own.
    """
    # Levels of `base` segments give only the powers of `base`. For other lengths,
    # levels are unequal, and their product is the largest one that is not above the
    # length.
    result: list[Nest] = []
    # There are few nests, as `_levels` leaves over few steps. Each one is a program of
    # its own.
    while length >= block:
        nest = Nest(_levels(length // block, base), block)
        result.append(nest)
        length -= nest.length
    if length:
        result.append(Nest((1,), length) if block > 1 else Nest((length,)))
    return tuple(result)


@functools.lru_cache(maxsize=1024)
def _levels(length: int, base: int) -> tuple[int, ...]:
    """The levels with the largest product that is not above the length.

    They have at most `base * log_base(length)` segments in all.
    """
    # The number of levels is the least that leaves over no more than an eighth of the
    # steps. With fewer levels, a small base would leave most steps to further nests,
    # each with slots of its own. Of equal products the one with the fewest segments is
    # taken.
    slots = max(base, ceil(base * log(length, base))) if length > 1 else 1
    if length <= slots:
        return (length,)
    best: tuple[int, ...] = ()
    # Fewer levels first: each further level runs most of the steps once more.
    for depth in range(2, length.bit_length() + 1):
        candidates = _candidates(length, depth, slots)
        key = lambda levels: (prod(levels), -sum(levels), levels)
        best = max([best, *candidates], key=key)
        if 8 * (length - prod(best)) <= length:
            break
    # A level of one segment would add a loop and store nothing new.
    return tuple(level for level in best if level > 1)


def _root(length: int, depth: int) -> int:
    """The largest `n` with `n**depth <= length`."""
    # The rounded root may be one too large, but is never two off.
    root = max(round(length ** (1 / depth)), 1)
    return root if root**depth <= length else root - 1


def _candidates(length: int, depth: int, slots: int) -> Iterator[tuple[int, ...]]:
    """Levels to choose from, in descending order."""
    # All but one are near the root of the length. The last one is as long as the length
    # and the number of slots allow.
    # Of all numbers with the same sum, equal ones have the largest product.
    root = _root(length, depth)
    # A wide choice leaves few steps over. With many levels there are many combinations
    # even of a narrow one.
    width = 6 if depth <= 5 else 2 if depth <= 10 else 1
    around = range(max(root - width, 1), root + width + 1)
    for levels in itertools.combinations_with_replacement(around, depth - 1):
        last = min(length // prod(levels), slots - sum(levels))
        if last >= 1:
            yield tuple(sorted((*levels, last), reverse=True))
