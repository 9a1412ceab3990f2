"""Consecutive segments, each of which is reversed by an order of its own.

This is what `LoopSpec.cut` makes: the order of schedules from other projects. A budget
of two places also has equal segments.
"""

import dataclasses
from collections.abc import Sequence

from ._order import AbstractSlotOrder
from ._tree import AbstractJoined, Repeated


@dataclasses.dataclass(frozen=True)
class Segmented(AbstractJoined):
    """The primal stores the carry at the start of each segment.

    On the way back, each segment is run again from there, to store the carries that its
    own order starts from, and is then reversed by that order. Equal segments share a
    loop, and so one copy of the step in the program.

    Attributes:
        parts: For each group of equal consecutive segments, how many there are, and the
            order of one.
    """

    parts: tuple[tuple[int, AbstractSlotOrder], ...]

    @property
    def orders(self) -> Sequence[Repeated]:
        return [Repeated(count, order) for count, order in self.parts]
