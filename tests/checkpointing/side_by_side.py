"""A schedule whose segments are run again side by side."""

import dataclasses

import eqloop as el
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.engine.reversals._together import Together, can_join


@dataclasses.dataclass(frozen=True)
class Abreast(el.AbstractSchedule):
    """Segments of equal length, and a rest whose carries are all stored.

    Attributes:
        each: How many steps a segment has.
        side_by_side: How many of them run at once.
        size: How many steps are reversed together; with 1, they are one by one.
        outer: How many segments another level around these has, if there is one.
    """

    each: int
    side_by_side: int
    size: int = 1
    outer: int = 1

    def layout(self, loop: el.LoopSpec) -> Layout:
        # As a budget has it: a batch would run both sides of a branch.
        joins = can_join(loop._problem.step)
        side_by_side, size = (self.side_by_side, self.size) if joins else (1, 1)
        count = loop.length // (self.each * self.outer)
        levels = *[self.outer] * (self.outer > 1), count, self.each
        nests = [Nest(levels, side_by_side=min(side_by_side, count))] * (count > 0)
        left = loop.length - sum(nest.length for nest in nests)
        nests += [Nest((left,))] * (left > 0)
        reversal = Together(size) if size > 1 else ByResiduals()
        return Layout(Nested(tuple(nests)), reversal=reversal)
