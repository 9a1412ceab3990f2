"""Carries in two places: which of them are stored where. Plain Python, no JAX.

The places are as in H-Revolve (Herrmann & Pallez 2020). The near one is fast and small:
storing a carry there costs nothing. The far one is large, and writing or reading a
carry has a cost, in units of a step. A chain is cut into *leaves*. Each is reversed
from the carry at its start with all near slots, by `_binomial`. The carries from which
leaves are reached are in far slots, which are used as a stack.

Let `f(n)` be the number of advances within a leaf of `n` steps. Let `P(n, m)` be the
least cost of reversing `n` steps whose first carry is in one of `m` far slots, and
`O(n, m)` the same if that carry is at hand, but not stored:

    P(n, m) = min(f(n), min over j of j + O(n - j, m - 1) + read + P(j, m))
    O(n, m) = min(f(n), write + P(n, m)),  O(n, 0) = f(n)

In the first line, `j` steps are run to the start of the right part, which is reversed
with one far slot less. Then the first carry is read again for the left part. The primal
runs all steps anyway, and leaves carries in `k` far slots on its way:

    S(n, k) = min over j of write + read + P(j, k) + S(n - j, k - 1),  S(0, 0) = 0.

References:
    J. Herrmann and G. Pallez, *H-Revolve: a framework for adjoint computation on
    synchronous hierarchical platforms*, ACM TOMS 46(2), 2020; G. Aupy, J. Herrmann,
    P. Hovland and Y. Robert, *Optimal multistage algorithm for adjoint computation*,
    SIAM J. Sci. Comput. 38(3), 2016.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from . import _binomial

# Filling the tables looks at each length, each first part of it, and each number of
# slots. With this many combinations it takes some hundredths of a second.
_MOST_ENTRIES = 2**22
_MOST_CELLS = 1024
# The most leaves: the program has a table of all of them.
_MOST_LEAVES = 2**14


class Leaf(NamedTuple):
    """One leaf, and the way to its first carry.

    Attributes:
        row: The far slot that is read.
        begin: The position of the carry in that slot.
        pushes: The positions of carries that are stored on the way from there to the
            start of the leaf, in the far slots that follow.
        start: Where the leaf starts.
        stop: Where it ends.
    """

    row: int
    begin: int
    pushes: tuple[int, ...]
    start: int
    stop: int


class Leaves(NamedTuple):
    """A chain that is cut into leaves.

    Attributes:
        starts: The positions whose carries the primal leaves in far slots.
        leaves: The leaves, the last one first, as they are reversed.
    """

    starts: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    @property
    def writes(self) -> int:
        """How many carries are written to far slots."""
        return len(self.starts) + sum(len(leaf.pushes) for leaf in self.leaves)

    @property
    def reads(self) -> int:
        """How many carries are read from far slots."""
        return len(self.leaves)

    def cost(self, near: int, write: float, read: float) -> float:
        """The cost that is minimised: advances, and moves in units of an advance."""
        advances = sum(
            leaf.start - leaf.begin + _binomial.advances(leaf.stop - leaf.start, near)
            for leaf in self.leaves
        )
        return advances + write * self.writes + read * self.reads


@functools.lru_cache(maxsize=256)
def cut(length: int, near: int, far: int, write: float, read: float) -> Leaves:
    """Cuts a chain into leaves at the least cost.

    For chains of up to some two hundred steps, this is the least possible cost. Longer
    chains are cut in three ways, and the cheapest one is taken:

    - by the recurrences, at multiples of some number of steps;
    - as if moves cost nothing;
    - into equal leaves with a far slot for each, which is nearly optimal if there are
      enough far slots (Aupy & Herrmann 2017).

    Args:
        length: The number of steps, at least 1.
        near: The number of near slots, at least 1.
        far: The number of far slots, at least 1.
        write: What it costs to write to a far slot, in steps.
        read: What it costs to read from one.
    """
    found = [_by_tables(length, near, far, write, read)]
    found += _by_ranks(length, near, min(far, length))
    fewest = -(-length // min(far, length, _MOST_LEAVES))
    sizes = [n for n in _leaf_sizes(length) if n > fewest]
    costs = {n: _equal_cost(length, n, near, write + read) for n in [fewest, *sizes]}
    found.append(_equal(length, min(costs, key=lambda n: costs[n])))
    return min(found, key=lambda one: one.cost(near, write, read))


def _equal(length: int, size: int) -> Leaves:
    """Leaves of equal size, except the first, with a far slot for each of them."""
    starts = _positions(length, size)
    pairs = itertools.pairwise([*starts, length])
    leaves = [Leaf(i, a, (), a, b) for i, (a, b) in enumerate(pairs)]
    return Leaves(tuple(starts), tuple(leaves[::-1]))


def _equal_cost(length: int, size: int, near: int, move: float) -> float:
    count, first = -(-length // size), (length - 1) % size + 1
    others = (count - 1) * _binomial.advances(size, near)
    return count * move + others + _binomial.advances(first, near)


def _positions(length: int, size: int) -> list[int]:
    """The starts of cells of equal size, except the first, which may be shorter."""
    return [0, *range((length - 1) % size + 1, length, size)]


def _leaf_sizes(most: int) -> Iterator[int]:
    """Lengths up to `most`, each a few per cent above the last."""
    size = 1
    while size < most:
        yield size
        size = max(size + 1, round(size * 1.02))
    yield most


class _Part(NamedTuple):
    """A part of a chain whose first carry is in a far slot.

    Attributes:
        start: Where it starts.
        stop: Where it ends.
        slots: How many far slots there are for it, its own included.
        row: Its own slot.
        rank: How often a step of it may be advanced over, if there is a limit.
    """

    start: int
    stop: int
    slots: int
    row: int
    rank: int = 0


# From the length of a part, its slots and its rank: how many steps come before the
# first cut, 0 for none; whether the carry at the cut is stored; and the rank of the
# steps before it.
_Split = Callable[[int, int, int], tuple[int, bool, int]]


def _cut_parts(parts: Sequence[_Part], split: _Split) -> Iterator[Leaf]:
    """The leaves of consecutive parts, the last one first."""
    # The parts that are left to cut, in ascending order of their rows. No two of them
    # share a row, so they are a stack like the far slots themselves.
    left, pushes = list(parts), list[int]()
    while left:
        part = left.pop()
        first, is_stored, rank = split(part.stop - part.start, part.slots, part.rank)
        middle = part.start + first
        if first:
            left.append(part._replace(stop=middle, rank=rank))
        if is_stored:
            more = dict(start=middle, slots=part.slots - 1, row=part.row + 1)
            left.append(part._replace(**more))
            pushes.append(middle)
            continue
        # The carry that is read is the last one that was stored before the pushes.
        row = part.row - len(pushes)
        at = bisect.bisect_left(left, row, key=lambda part: part.row)
        begin = left[at].start if at < len(left) else part.start
        yield Leaf(row, begin, tuple(pushes), middle, part.stop)
        pushes = []


def _by_ranks(length: int, near: int, far: int) -> list[Leaves]:
    """The cuts as if moves cost nothing; none if that makes too many leaves.

    Then near and far slots are alike. A part with `m` far slots is reversed by the
    binomial order for `near + m` slots, and it is a leaf if the near slots are enough
    at its rank.
    """
    # The sum of the reaches of the segments of the primal, by Pascal's triangle.
    total = lambda rank: (
        math.comb(near + far + rank + 1, rank + 1) - math.comb(near + rank + 1, near)
    )
    rank = next(rank for rank in itertools.count() if total(rank) >= length)
    if rank == 0:
        return []  # there is a slot for every step
    left_over, parts, start = length - total(rank - 1), list[_Part](), 0
    for row in range(far):
        slots = near + far - row
        base = _binomial.reach(slots, rank - 1)
        extra = min(left_over, _binomial.reach(slots, rank) - base)
        left_over -= extra
        parts.append(_Part(start, start + base + extra, far - row, row, rank))
        start += base + extra

    def split(n: int, slots: int, rank: int) -> tuple[int, bool, int]:
        reach = _binomial.reach(near, rank)
        if n <= reach:
            return 0, False, rank
        first = _binomial.split_at(n, slots + near, rank)
        return first, n - first > reach, rank - 1

    leaves = tuple(itertools.islice(_cut_parts(parts, split), _MOST_LEAVES + 1))
    if len(leaves) > _MOST_LEAVES:
        return []
    return [Leaves(tuple(part.start for part in parts), leaves)]


def _by_tables(length: int, near: int, far: int, write: float, read: float) -> Leaves:
    """The cuts by the recurrences, in cells of as few steps as the tables allow."""
    most = min(math.isqrt(_MOST_ENTRIES // far), _MOST_CELLS)
    most = max(most, round(_MOST_ENTRIES ** (1 / 3)))
    size = -(-length // most)
    tables = _Tables(-(-length // size), size, near, far, write, read)
    where = [*_positions(length, size), length]
    starts, leaves = tables.leaves()
    moved = (
        Leaf(
            leaf.row,
            where[leaf.begin],
            tuple(where[cell] for cell in leaf.pushes),
            where[leaf.start],
            where[leaf.stop],
        )
        for leaf in leaves
    )
    return Leaves(tuple(where[cell] for cell in starts), tuple(moved))


class _Tables:
    """`P`, `O` and `S` for a chain of cells of equal size."""

    def __init__(
        self, cells: int, size: int, near: int, far: int, write: float, read: float
    ):
        self.cells, self.size, self.slots = cells, size, min(far, cells)
        self.write, self.read = write, read
        within = [_binomial.advances(n * size, near) for n in range(1, cells + 1)]
        # `f`, `P`, `O` and `S` of the formulas at the top, in this order.
        self.leaf = np.array([0.0, *within])
        # A row for each length, and a column for each number of slots.
        self.stored = np.repeat(self.leaf[:, None], self.slots + 1, 1)
        self.at_hand = self.stored.copy()
        for n in range(2, cells + 1):
            split = self._split(n, slice(1, None), slice(None, -1))
            self.stored[n, 1:] = np.minimum(self.leaf[n], split.min(0))
            stored = write + self.stored[n, 1:]
            self.at_hand[n, 1:] = np.minimum(self.leaf[n], stored)
        self.primal = [np.full(cells + 1, np.inf)]
        self.primal[0][0] = 0.0
        for k in range(1, self.slots + 1):
            # For all `j` and `n` at once. The row `j` of `rest` has `S(n - j, k - 1)`.
            rest = _shifted(self.primal[-1])[1:]
            costs = (write + read + self.stored[1:, k])[:, None] + rest
            self.primal.append(costs.min(0))

    def _split(self, n: int, slots: int | slice, fewer: int | slice) -> np.ndarray:
        """The cost of each first part of a chain whose first carry is stored."""
        first = np.arange(1, n) * self.size
        rest, before = self.at_hand[n - 1 : 0 : -1, fewer], self.stored[1:n, slots]
        return (rest.T + first).T + self.read + before

    def leaves(self) -> Leaves:
        """The chain, cut at the least cost."""
        # The best number of slots for the primal, then the best first part for each.
        # The tables have only costs, so each `argmin` is found again here.
        slots = min(range(1, self.slots + 1), key=lambda k: self.primal[k][-1])
        starts, start, left = [0], 0, self.cells
        for k in range(slots, 1, -1):
            others = self.primal[k - 1][left - 1 :: -1][:left]
            costs = self.write + self.read + self.stored[1 : left + 1, k] + others
            first = 1 + int(np.argmin(costs))
            start, left = start + first, left - first
            starts.append(start)
        ends = [*starts[1:], self.cells]
        parts = [
            _Part(starts[row], ends[row], slots - row, row) for row in range(slots)
        ]
        return Leaves(tuple(starts), tuple(_cut_parts(parts, self._cut_part)))

    def _cut_part(self, n: int, slots: int, rank: int) -> tuple[int, bool, int]:
        first = self._first_part(n, slots)
        return first, bool(first) and self._is_stored(n - first, slots - 1), rank

    def _first_part(self, n: int, slots: int) -> int:
        """How many cells come before the first cut of a stored part, or 0."""
        if n == 1:
            return 0
        costs = self._split(n, slots, slots - 1)
        first = int(np.argmin(costs))
        return first + 1 if costs[first] < self.leaf[n] else 0

    def _is_stored(self, n: int, slots: int) -> bool:
        """Whether the carry at the start of a part that is at hand is stored."""
        stored = self.write + self.stored[n, slots]
        return slots > 0 and bool(stored < self.leaf[n])


def _shifted(row: np.ndarray) -> np.ndarray:
    """For `j` and `n` the entry at `n - j` of a row, or infinity before it."""
    size = len(row)
    padded = np.concatenate([np.full(size - 1, np.inf), row])
    return np.lib.stride_tricks.sliding_window_view(padded, size)[::-1]
