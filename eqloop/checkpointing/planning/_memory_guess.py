"""What layouts take, told from those of which the program was compiled."""

from collections.abc import Hashable, Iterable

from ..engine._costs import StepCost
from ..engine._layout import Layout
from ._paces import Paces, Seen

# What was seen in another layout counts in full if the guess is off by such a factor.
_FAR_OFF = 8


class Guess:
    """The bytes that a layout takes, as far as is known.

    XLA makes programs of a kind of layouts that are alike. What one of them takes, more
    or less than was counted, another will take, too.
    """

    def __init__(self, paces: Paces, checked: Iterable[tuple[Layout, int]] = ()):
        self._paces = paces
        self._known: dict[Layout, int] = {}
        self._seen: dict[Hashable, Seen] = {}
        # What was not counted: the least of each reversal, with what its blocks took,
        # and the most of what takes single steps back by it, or blocks.
        self._least_more: dict[Hashable, tuple[int, int]] = {}
        self._most_more: dict[tuple[Hashable, bool], int] = {}
        for seen in paces.sizes:
            self._note(seen)
        for layout, measured in checked:
            self.learn(layout, measured)

    def __call__(self, layout: Layout) -> int:
        """The bytes of a layout: those that were measured, or the guess."""
        if layout in self._known:
            return self._known[layout]
        stored = self.counted(layout)
        if not self.knows_kind(layout):
            # The cotangents of consts, for example, may lie where the outputs will.
            most = working_set(self._cost(layout))
            if self._paces.compiles_slowly:
                # Rather too much: to look at another program would take long.
                seen = (more + more // 2 for more in self._most_more.values())
                return stored + max([most, *seen])
            # Nobody has counted what a step has within a checkpoint of its own.
            more = self._most_more.get(_way_back(layout), most)
            return stored + (more if more > _FAR_OFF * most else min(more, most))
        other, measured, counted = self._seen[layout.kind]
        if measured >= counted:
            return stored + measured - counted
        # Slots are counted well. What the reversal of a block takes is not.
        blocks, of_other = self._of_blocks(layout), self._of_blocks(other)
        if of_other and (left := measured - counted + of_other) >= 0:
            return stored - blocks + blocks * left // of_other
        return stored * measured // max(counted, 1)

    def at_best(self, layout: Layout) -> int:
        """The bytes of a layout, if there is hope: few of them are not counted."""
        # Of a kind that was not measured, these are as few as of any other kind that
        # takes blocks back in the same way. Where each program takes long to compile,
        # nothing is hoped for.
        if self.knows_kind(layout) or self._paces.compiles_slowly:
            return self(layout)
        # What a batch takes is counted.
        cost, one_by_one = self._cost(layout), layout.reversal.stores_residuals
        usual = working_set(cost) - cost.ct_consts if one_by_one else 0
        more, of_seen = self._least_more.get(layout.reversal.kind, (usual, 0))
        if of_seen and not one_by_one:
            # There may be less of it in a smaller batch.
            more = more * min(self._of_blocks(layout), of_seen) // of_seen
        return min(self.counted(layout) + more, self(layout))

    def counted(self, layout: Layout) -> int:
        """The bytes of what a layout stores, which is not all that it takes."""
        return counted_bytes(layout, self._cost(layout))

    def learn(self, layout: Layout, measured: int) -> None:
        """Takes note of what was measured."""
        self._known[layout] = measured
        self._note(Seen(layout, measured, self.counted(layout)))

    def _note(self, seen: Seen) -> None:
        more, way = max(seen.measured - seen.counted, 0), _way_back(seen.layout)
        kind = seen.layout.reversal.kind
        least = more, self._of_blocks(seen.layout)
        self._least_more[kind] = min(self._least_more.get(kind, least), least)
        self._most_more[way] = max(self._most_more.get(way, more), more)
        # The latest finding is the nearest to what is looked for.
        self._seen[seen.layout.kind] = seen

    def knows(self, layout: Layout) -> bool:
        """Whether a layout was measured."""
        return layout in self._known

    def knows_kind(self, layout: Layout) -> bool:
        """Whether one of its kind was measured."""
        return layout.kind in self._seen

    def knows_way_back(self, layout: Layout) -> bool:
        """Whether one was measured that takes steps back in this way."""
        return _way_back(layout) in self._most_more

    def _cost(self, layout: Layout) -> StepCost:
        return self._paces.of(layout).cost

    def _of_blocks(self, layout: Layout) -> int:
        return layout.order.bytes_of_blocks(self._cost(layout), layout.reversal)


def _way_back(layout: Layout) -> tuple[Hashable, bool]:
    """How steps are taken back.

    Single steps tell nothing of blocks, for which XLA may copy a weight.
    """
    return layout.reversal.kind, layout.block > 1


def counted_bytes(layout: Layout, cost: StepCost) -> int:
    """The bytes of what a layout stores on the device, even if that is its host."""
    return layout.order.stored_bytes(cost, layout.reversal, not layout.is_elsewhere)


def working_set(cost: StepCost) -> int:
    """The bytes that are allocated besides what a layout stores, as a guess."""
    return 4 * cost.carry + 2 * cost.ct_consts + 3 * cost.residuals
