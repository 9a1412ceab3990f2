"""Nested levels of segments, all of them with static trip counts.

On a GPU, a loop whose trip count is not static waits for the host in each iteration.
How a loop is cut into levels is worked out in `_levels.py`.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

from .._pace import Pace
from .._sweep import AbstractReversal
from ._levels import Nest
from ._order import AbstractSlotOrder
from ._tree import AbstractJoined, Repeated, SingleSteps, StepBlock

# The most levels of a nest that is compiled to find out its memory. Each level makes
# the program longer.
_DEEPEST = 4


@dataclasses.dataclass(frozen=True)
class Nested(AbstractJoined):
    """Consecutive nests.

    Attributes:
        nests: The nests, in the order of their steps.
    """

    nests: tuple[Nest, ...]

    @property
    def orders(self) -> Sequence[AbstractSlotOrder]:
        return self._trees

    @functools.cached_property
    def _trees(self) -> list[AbstractSlotOrder]:
        return list(map(_of_levels, self.nests))

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return tuple(nest.levels for nest in self.nests)

    @property
    def most_groups(self) -> int:
        # All nests that there are. The way back has the step once for each as well.
        return len(self.nests)

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        entries = sum(order.filling_time(pace) for order in self.orders)
        return entries + super().reversed_in(pace, reversal)

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        # A program that has the step twice has been seen to be slower by up to half,
        # but not if the steps are reversed in batches.
        worse = 1 + 0.1 * (len(self.nests) - 1) * (reversal.batch(1) == 1)
        return super().duration(pace, reversal) * worse

    @property
    def kind(self) -> Hashable:
        depth = min(max(len(nest.levels) for nest in self.nests), 3)
        return "nested", self.block == 1, depth

    def stand_in(self, leaves: int) -> tuple["Nested", int]:
        nests = tuple(_with_few_levels(nest) for nest in self.nests)
        # How many levels were left out in all.
        count = lambda nests: sum(len(nest.levels) for nest in nests)
        deeper = count(self.nests) - count(nests)
        # Each level has counters of its own, and a few values that move between loops.
        # Up to 9 kB were seen with 50 leaves, and 1 kB with two leaves.
        return Nested(nests), deeper * (1024 + 176 * leaves)


def _of_levels(nest: Nest) -> AbstractSlotOrder:
    """A nest as a tree, the outermost level first."""
    *outer, last = nest.levels
    order = SingleSteps(last)
    if nest.block > 1:
        order = Repeated(last, StepBlock(nest.block))
    for count in reversed(outer):
        order = Repeated(count, order)
    return order


def _with_few_levels(nest: Nest) -> Nest:
    """A nest of fewer levels with as many slots, for the same memory."""
    # The first level is stored by the primal, and slots of the last one may lack
    # leaves. Those in between are all alike, so they are put together.
    if len(nest.levels) <= _DEEPEST:
        return nest
    first, *between, last = nest.levels
    kept = _DEEPEST - 3
    levels = (first, *between[:kept], sum(between[kept:]), last)
    return dataclasses.replace(nest, levels=levels)
