"""Nested checkpointing: how to cut a loop into levels, in plain Python, no JAX.

A nest of levels `(n1, n2, ..., nk)` runs `n1 * n2 * ... * nk` blocks. While the primal
runs, `n1` carries are stored; the reverse sweep takes these segments last to first,
stores `n2` carries within one, and so on down. All trip counts are static.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from math import ceil, log, prod


@dataclasses.dataclass(frozen=True)
class Nest:
    """Consecutive steps under nested levels of equal segments.

    Attributes:
        levels: How many segments each level has, the outermost first.
        block: How many steps the innermost segments have; their residuals are
            stored together.
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
    def slots(self) -> int:
        """The carries that are stored at once when all levels are in use."""
        return sum(self.levels)

    @property
    def advances(self) -> int:
        """The steps that are run again, only to store the carries of inner levels."""
        total, segments, size = 0, 1, self.length
        for outer, inner in itertools.pairwise(self.levels):
            segments, size = segments * outer, size // outer
            total += segments * (size - size // inner)
        return total


def nests(length: int, base: int, block: int = 1) -> tuple[Nest, ...]:
    """Levels of about `base` segments each, for any length.

    Levels of `base` segments reach only the powers of `base`. Other lengths take
    unequal levels, whose product comes as near to the length as it can from below;
    the steps that are then left over, a few, make a nest of their own.
    """
    result: list[Nest] = []
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

    They have at most `base * log_base(length)` segments in all, and are as few as leave
    over an eighth of the steps or less: with fewer levels still, a small base would
    leave most of the steps to nest after nest, each with slots of its own. Of equal
    products the one with the fewest segments is taken.
    """
    slots = max(base, ceil(base * log(length, base))) if length > 1 else 1
    if length <= slots:
        return (length,)
    best: tuple[int, ...] = ()
    for depth in range(2, length.bit_length() + 1):
        candidates = _candidates(length, depth, slots)
        key = lambda levels: (prod(levels), -sum(levels), levels)
        best = max([best, *candidates], key=key)
        if 8 * (length - prod(best)) <= length:
            break
    return tuple(level for level in best if level > 1)


def _root(length: int, depth: int) -> int:
    """The largest `n` with `n**depth <= length`."""
    root = max(round(length ** (1 / depth)), 1)
    return root if root**depth <= length else root - 1


def _candidates(length: int, depth: int, slots: int) -> Iterator[tuple[int, ...]]:
    """Descending levels around the root, one of them as long as still fits."""
    root = _root(length, depth)
    # A wide choice leaves few steps over; many levels have a choice already.
    width = 6 if depth <= 5 else 2 if depth <= 10 else 1
    around = range(max(root - width, 1), root + width + 1)
    for levels in itertools.combinations_with_replacement(around, depth - 1):
        last = min(length // prod(levels), slots - sum(levels))
        if last >= 1:
            yield tuple(sorted((*levels, last), reverse=True))
