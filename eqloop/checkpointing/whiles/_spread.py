"""Spreads the slots of a loop of unknown length over all steps that it has run.

While there are free slots, every carry is stored. After that, storing one more carry
means to give up another one, which merges two segments:

    |---|-|--|-----|        give up the third carry:    |---|----|-----|
    0   1 2  3     now                                  0   1    2     now: free

A segment with `i` slots before it is reversed with `s - i` of the `s` slots, so at rank
`r` it can be `reach(s - i, r)` steps long (`_binomial`). There is one rank for the
whole loop. Two segments are merged only if the result is within the reach of that rank,
and the rank is raised when no two can be merged.

- At rank 1, the first two segments that fit are merged, and every carry is stored. Up
  to `s (s + 3) / 2` steps this is optimal, whatever the number of steps turns out to
  be, as is the first algorithm of Stumm & Walther (2010).
- At higher ranks, the last two that fit are merged, so that segments with many slots
  become the long ones. The last segment grows first: to `r + 1` steps, its reach at
  this rank, or from rank 3 on to `r` if it can then be merged with the one before.

Beyond rank 1, no rule can be optimal for all numbers of steps; this one was found by
trying. On average it takes less than a per cent more evaluations than would be needed
if the number of steps were known.

References:
    P. Stumm and A. Walther, *New algorithms for optimal online checkpointing*, SIAM J.
    Sci. Comput. 32(2), 2010.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from ..._programs import constant
from ..._types import Index, Value
from ..engine.orders import _binomial
from ..steps._loop import element
from ._until_stop import UNLIMITED

# The highest rank in the table of reaches. With two slots, the reach at rank `r` is
# about `r**2 / 2` steps, so this is enough for a million of them.
_MOST_RANKS = 1500


@dataclasses.dataclass(frozen=True)
class Spreading:
    """The rule by which slots are given up as a loop goes on.

    Attributes:
        checkpoints: How many slots there are.
        max_steps: The most steps that are run.
    """

    checkpoints: int
    max_steps: int

    @property
    def ranks(self) -> int:
        """The highest rank that a segment may get, see the top of this file."""
        if self.checkpoints == 1:
            return 1
        return min(_binomial.rank_of(self.max_steps, self.checkpoints) + 1, _MOST_RANKS)

    @property
    def reach(self) -> list[list[int]]:
        """The table by which segments are merged, and split on the way back."""
        return _binomial.reach_table(self.checkpoints, self.ranks, UNLIMITED)

    @property
    def most_thrice(self) -> int:
        """How long a loop may be of which no step is evaluated more than 3 times."""
        return self.checkpoints * (self.checkpoints + 3) // 2


class Spread(NamedTuple):
    """The slots in the order of their carries, once all of them are in use.

    Attributes:
        starts: The positions of the carries.
        rows: The rows that they are stored in, and at the end the row that is no slot.
        rank: The rank of the loop.
        stop: The position at which the next carry may be stored.
    """

    starts: Value
    rows: Value
    rank: Index
    stop: Index


def full(checkpoints: int) -> Spread:
    """The slots when the first carries have just filled them."""
    rows = jnp.arange(checkpoints + 1, dtype=jnp.int32)
    rank, stop = (jnp.asarray(n, jnp.int32) for n in (1, checkpoints))
    return Spread(rows[:-1], rows, rank, stop)


def move_on(rule: Spreading, spread: Spread, position: Index) -> Any:
    """Gives up a slot for the carry at a position, or raises the rank.

    It returns the row for the carry (no slot if the rank was raised) and the state.
    """
    starts, rows, rank, _ = spread
    place = _place_to_free(rule, spread, position)
    # Slots before `place` stay. The later ones move down by one place, and the freed
    # row comes last. The row that is no slot stays at the end.
    is_kept = jnp.arange(rule.checkpoints + 1, dtype=jnp.int32) < place
    row = element(rows, place)
    starts = jnp.where(is_kept[:-1], starts, appended(starts[1:], position))
    moved = appended(appended(rows[1:-1], row), rule.checkpoints)
    rows = jnp.where(is_kept, rows, moved)
    # Nothing was given up: `place` is beyond all slots, and nothing has moved.
    is_full = (place == rule.checkpoints).astype(jnp.int32)
    rank = jnp.minimum(rank + is_full, rule.ranks)
    # When the next carry may be stored, by the rule at the top. The last two segments
    # have 2 slots, whose reach at rank `r` is `(r + 1) (r + 2) / 2`.
    before, last = starts[-2], starts[-1]
    fits_soon = (rank > 2) & (last + rank - before <= (rank + 1) * (rank + 2) // 2)
    grown = jnp.where(rank == 1, 1, jnp.where(fits_soon, rank, rank + 1))
    stop = jnp.maximum(last + grown, position + 1)
    return row, Spread(starts, rows, rank, stop)


def appended(numbers: Value, last: Value) -> Value:
    """An array of integers with one more of them at its end."""
    return jnp.append(numbers, jnp.asarray(last, numbers.dtype))


def _place_to_free(rule: Spreading, spread: Spread, position: Index) -> Value:
    """The place of the carry to give up, or the number of slots if there is none.

    Its segment is merged with the one before.
    """
    # Wang, Moin & Iaccarino (2009) minimise the greatest number of times that any step
    # is run. Here the rank is a bound for that number. Among the places that keep to
    # it, the choice is for the sum of all evaluations.
    starts, slots = spread.starts, rule.checkpoints
    # reach[r - 1][i] is the reach of a segment with `i` slots before it, at rank `r`.
    columns = zip(*rule.reach[:1:-1], strict=True)
    reach = constant(list(columns)[2:])
    # Entry `i` is how long segment `i` becomes if the carry at place `i + 1` is given
    # up. The last entry ends here. Place 0 has the initial carry, which is never given
    # up.
    merged = appended(starts[2:], position) - starts[:-1]
    fits = merged <= element(reach, spread.rank - 1)
    place = jnp.arange(1, slots, dtype=jnp.int32)
    # The place with the highest preference among those that fit; 0 if none does. At
    # rank 1 earlier places are preferred, at higher ranks later ones.
    is_first = spread.rank == 1
    best = jnp.max(jnp.where(fits, jnp.where(is_first, slots - place, place), 0))
    found = jnp.where(is_first, slots - best, best)
    return jnp.where(best > 0, found, slots)
