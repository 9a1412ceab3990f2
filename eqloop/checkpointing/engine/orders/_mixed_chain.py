"""Mixed storage: combinatorics in plain Python, no JAX.

A chain of steps is reversed with slots, each of which can hold a carry, as in
`_binomial.py`. Here, `rows` slots can hold the residuals of a step instead. A step
whose residuals are stored is reversed without being run again.

A chain starts at a stored carry. If the other slots can hold the residuals of all its
steps but the last, the chain is run once and then reversed: its rank is 0. A chain of a
higher rank is split, as in `_binomial.py`. The right part is reversed first, with one
slot less and the same rank; the left part is reversed with all slots and the rank
below. So the longest chains follow from those of rank 0:

    longest(slots, 0) = 1 + (slots - 1) // rows
    longest(slots, rank) = longest(slots, rank - 1) + longest(slots - 1, rank)

With carries alone, a chain of rank 0 would have one step, and these would be the
binomial coefficients.

References:
    J. R. Maddison, *Step-based checkpointing with high-level algorithmic
    differentiation*, 2024, [arXiv:2305.09568](https://arxiv.org/abs/2305.09568),
    where a dynamic program finds the least number of evaluations. The orders here take
    at most a few per cent more, and are known at once for chains of any length.
"""

import bisect
import dataclasses
import functools
import itertools

# `longest`, by rank and then by the number of slots.
Table = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class MixedChain:
    """A chain of steps, and slots for carries and residuals.

    Attributes:
        length: How many steps it has.
        slots: How many slots there are. There are no more of them than steps.
        rows: How many slots the residuals of a step take.
    """

    length: int
    slots: int
    rows: int

    @property
    def longest(self) -> Table:
        """The longest chains, up to the rank that this one needs."""
        return _longest(self.length, self.slots, self.rows)

    @property
    def segments(self) -> list[int]:
        """The lengths of the segments between the carries that the primal stores.

        As in `_binomial.segments`, all segments get their reach at one rank after the
        other, and the steps that are left over go to the first ones. Each segment has
        at least one step, so that all slots are in use.
        """
        # The reach at the rank below the last one; below rank 0, it is one step each.
        *_, below, most = ((1,) * (self.slots + 1), *self.longest)
        lengths = [below[self.slots - i] for i in range(self.slots)]
        left_over = self.length - sum(lengths)
        for i in range(self.slots):
            extra = min(left_over, most[self.slots - i] - lengths[i])
            lengths[i] += extra
            left_over -= extra
        return lengths

    @property
    def advances(self) -> int:
        """How many steps are run again only to get to a later carry."""
        return _work_of(self)[0]

    @property
    def kept(self) -> int:
        """How many steps are reversed from residuals that were stored."""
        return _work_of(self)[1]

    def split_at(self, length: int, slots: int) -> int:
        """How far to advance before the next carry is stored.

        Args:
            length: The length of a chain.
            slots: The slots for it, the one with its first carry included.

        Returns:
            The number of steps, or 0 if the rank of the chain is 0.
        """
        return _split_at(_by_slots(self.longest), length, slots)


def _split_at(by_slots: Table, length: int, slots: int) -> int:
    """See `MixedChain.split_at`; the table is by slots, and then by rank."""
    # The rank is the number of ranks whose longest chain is too short.
    rank = bisect.bisect_left(by_slots[slots], length)
    if rank == 0:
        return 0
    # As in `_binomial.split_at`, with `longest` in place of `reach`.
    ahead = length - by_slots[slots - 1][rank - 1]
    return min(by_slots[slots][rank - 1], ahead)


@functools.lru_cache(maxsize=512)
def _longest(length: int, slots: int, rows: int) -> Table:
    # By rank, from 0 on; and by slots, from 0 on. A chain of one step needs no slot, as
    # the carry before it is at hand.
    table = [tuple(1 + max(count - 1, 0) // rows for count in range(slots + 1))]
    # The primal leaves a segment for each number of slots from 1 on, so their longest
    # chains add up.
    while sum(table[-1][1:]) < length:
        # The recursion of `longest`: each sum adds the chain of the rank below to the
        # sum for one slot less.
        longer = itertools.accumulate(table[-1][1:], initial=1)
        # No chain is longer than all steps, and smaller numbers fit into 32 bits.
        table.append(tuple(min(size, length + 1) for size in longer))
    return tuple(table)


@functools.lru_cache(maxsize=512)
def _by_slots(longest: Table) -> Table:
    return tuple(zip(*longest, strict=True))


@functools.lru_cache(maxsize=512)
def _work_of(chain: MixedChain) -> tuple[int, int]:
    """The advances of a chain, and how many of its steps have their residuals stored.

    Chains of the same length and with as many slots are split alike. Only a few of them
    come up, so remembering their work makes this fast.
    """
    known: dict[tuple[int, int], tuple[int, int]] = {}
    table = _by_slots(chain.longest)

    def of_segment(length: int, slots: int) -> tuple[int, int]:
        key = length, slots
        if key in known:
            return known[key]
        advances = kept = 0
        # The right part goes on in this loop, the left part is a call.
        while slots > 1 and (far := _split_at(table, length, slots)):
            before = of_segment(far, slots)
            advances, kept = advances + far + before[0], kept + before[1]
            length, slots = length - far, slots - 1
        # Rank 0: all but the last step are kept. With a single slot, the chain is run
        # again from its start for each of its steps.
        if slots > 1:
            kept += length - 1
        else:
            advances += length * (length - 1) // 2
        known[key] = advances, kept
        return known[key]

    segments = enumerate(chain.segments)
    work = [of_segment(length, chain.slots - i) for i, length in segments]
    return sum(a for a, _ in work), sum(k for _, k in work)
