"""Binomial checkpointing: combinatorics in plain Python, no JAX.

A chain of `n` steps is reversed with `s` slots. Each can hold one carry, and the first
one holds the start of the chain. The unit of work is an *advance*: one step that is run
only to get to a later carry. Their number is minimised; the reversal of a step costs
the same under every plan.

Everything follows from two numbers (Griewank & Walther 2000):

- `reach(s, r) = comb(s + r, s)`, the longest chain in which no step is advanced over
  more than `r` times;
- `advances(n, s)`, the least number of advances, which is convex and piecewise linear
  in `n`: it grows by `r` a step while `reach(s, r - 1) <= n < reach(s, r)`.

The *rank* of a chain is the least `r` for which `n <= reach(s, r)`. By Pascal's rule, a
chain of the full reach splits into two chains of full reach:

    start         stored carry                      end
      |--- reach(s, r-1) ---|--- reach(s-1, r) ------|
       s slots, one advance   one slot less, still r
       less is left           advances over each step

The right part is reversed first. Then its slot is free, and the left part, over which
one advance has been made, is reversed with all slots.

References:
    A. Griewank and A. Walther, *Algorithm 799: revolve*, ACM TOMS 26(1), 2000.
"""

import dataclasses
from collections.abc import Sequence
from math import comb


def reach(slots: int, rank: int) -> int:
    """The longest chain that `rank` advances over each step can reverse."""
    return comb(slots + rank, slots) if rank >= 0 else 0


def reach_table(slots: int, rank: int, most: int) -> list[list[int]]:
    """The `reach` by slots (rows, from 0) and by rank (columns, from -1)."""
    # No chain is longer than `most`, which fits into 32 bits. The column of rank -1 is
    # 0, so that "the rank below" exists for rank 0, too. With a single slot nothing is
    # split, and the rank can be as high as the length. So the table for one slot is a
    # dummy.
    if slots == 1:
        return [[0], [0]]
    ranks = range(-1, rank + 1)
    return [[min(reach(k, r), most) for r in ranks] for k in range(slots + 1)]


def rank_of(length: int, slots: int) -> int:
    """The least rank at which `slots` slots reverse a chain of `length` steps."""
    if slots == 1:
        return max(length - 1, 0)
    # Double the rank until it is enough, then bisect.
    low, high = -1, 1
    while reach(slots, high) < length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reach(slots, middle) >= length else (middle, high)
    return high if length > reach(slots, 0) else 0


def advances(length: int, slots: int) -> int:
    """The least number of advances that reverse a chain whose start is stored.

    The closed form of `A(n, s) = min over m of m + A(n - m, s - 1) + A(m, s)`.
    """
    # In any order, at most `reach(s, k)` steps are advanced over no more than `k`
    # times. So at least `n - reach(s, k)` are advanced over more often. The sum of that
    # over `k < r` is a lower bound, and the splits of `split_at` attain it (Griewank &
    # Walther 2000).
    rank = rank_of(length, slots)
    return rank * length - comb(slots + rank, slots + 1)


def split_at(length: int, slots: int, rank: int) -> int:
    """How far to advance before the next carry is stored, with two slots or more.

    Of the optimal splits it is the longest one, which stores the fewest carries.
    """
    # The left part has to be within its reach at the rank below, and the right part
    # must not fall short of its own reach at the rank below.
    # Pascal's rule: `length` is at most `reach(s, r - 1) + reach(s - 1, r)`. So the
    # right part is within its reach, too, whichever of the two is less.
    return min(reach(slots, rank - 1), length - reach(slots - 1, rank - 1))


def segments(length: int, slots: int) -> list[tuple[int, int]]:
    """The length and the rank of each segment at whose start the primal stores a carry.

    No length is 0. The primal runs every step anyway, so this is free.
    """
    # Segment `i` starts at a stored carry and is reversed while `i` slots before it are
    # in use, so it takes `advances(n, slots - i)`. These costs are convex in `n`, so a
    # greedy division of the steps is the cheapest: give every segment all of its reach
    # at one rank after the other, and the steps that are left over at the last rank to
    # segments in any order.
    slots = min(slots, length)
    rank = _rank_of_sweep(length, slots)
    # The reach of segment `i` at the rank below, then up to its reach at this rank.
    lengths = [reach(slots - i, rank - 1) for i in range(slots)]
    left_over = length - sum(lengths)
    result: list[tuple[int, int]] = []
    for i, base in enumerate(lengths):
        extra = min(left_over, reach(slots - i, rank) - base)
        left_over -= extra
        if base + extra:
            result.append((base + extra, rank))
    return result


def _rank_of_sweep(length: int, slots: int) -> int:
    """The least rank at which the `segments` can have `length` steps in sum."""
    # The sum over k = 1..s of reach(k, r) is reach(s, r + 1) - 1.
    return max(rank_of(length + 1, slots) - 1, 0)


def sweep_advances(length: int, slots: int) -> int:
    """The least number of advances, if the primal stores carries on its way.

    The closed form of the sum of `advances` over the `segments`.
    """
    slots = min(slots, length)
    rank = _rank_of_sweep(length, slots)
    # At rank 0, each step starts at a carry that the primal has stored.
    if rank == 0:
        return 0
    # All segments at their reach of the rank below: `r n - comb(s + r, s + 1)`, summed
    # over s = 1..slots with r = rank - 1. Each step that is left over adds its rank.
    at_rank_below = reach(slots, rank) - 1
    left_over = length - at_rank_below
    below = (rank - 1) * at_rank_below - comb(slots + rank, slots + 1) + rank
    return below + rank * left_over


def first_segment(length: int, slots: int) -> tuple[int, int]:
    """The first of the `segments` and its rank, without computing the others."""
    slots = min(slots, length)
    rank = _rank_of_sweep(length, slots)
    left_over = length - (reach(slots, rank) - 1)
    # As in `segments`, steps that are left over go to the first segment first.
    below = reach(slots, rank - 1)
    return below + min(left_over, reach(slots, rank) - below), rank


def crossings(length: int, slots: int, rank: int) -> int:
    """How often the first step of a chain is advanced over while it is reversed.

    A first block that is shorter saves its missing steps so many times.
    """
    if slots == 1:
        # The chain is run from its start for each of its steps but the first.
        return length - 1
    # Each split advances over the first step once, and leaves it in the left part.
    count = 0
    while length > 1:
        length, rank, count = split_at(length, slots, rank), rank - 1, count + 1
    return count


@dataclasses.dataclass(frozen=True)
class BlockChain:
    """A chain of blocks of equal size, except that the first one may be shorter.

    Attributes:
        steps: How many steps there are.
        size: How many steps a block has.
    """

    steps: int
    size: int

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return -(-self.steps // self.size)

    @property
    def missing(self) -> int:
        """How many steps the first block lacks."""
        return self.count * self.size - self.steps

    @property
    def sizes(self) -> Sequence[int]:
        """The different sizes of blocks."""
        return [self.size, self.size - self.missing] if self.missing else [self.size]

    def position(self, block: int) -> int:
        """The position at which a block starts."""
        return max(block * self.size - self.missing, 0)
