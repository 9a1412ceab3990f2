"""What layouts take, told from those of which the program was compiled."""

from collections.abc import Hashable

from ..engine._costs import StepCost
from ..engine._layout import Layout
from ._paces import Paces


class Guess:
    """The bytes that a layout takes, as far as is known.

    XLA makes programs of a kind of layouts that are alike. What one of them takes, more
    or less than was counted, another will take, too.
    """

    def __init__(self, paces: Paces):
        self._paces = paces
        self._known: dict[Layout, int] = {}
        self._seen: dict[Hashable, tuple[int, int]] = {}

    def __call__(self, layout: Layout) -> int:
        """The bytes of a layout: those that were measured, or the guess."""
        if layout in self._known:
            return self._known[layout]
        stored = self.counted(layout)
        counted, measured = self._like(layout)
        if measured < counted:
            return stored * measured // max(counted, 1)
        return stored + measured - counted

    def counted(self, layout: Layout) -> int:
        """The bytes of what a layout stores, which is not all that it takes."""
        return layout.stored_bytes(self._paces.of(layout).cost)

    def learn(self, layout: Layout, measured: int) -> None:
        """Takes note of what was measured."""
        self._known[layout] = measured
        seen = (self.counted(layout), measured)
        # The latest finding is the nearest to what is looked for.
        self._seen[layout.kind] = seen

    def knows(self, layout: Layout) -> bool:
        """Whether a layout was measured."""
        return layout in self._known

    def knows_kind(self, layout: Layout) -> bool:
        """Whether one of its kind was measured."""
        return layout.kind in self._seen

    def _like(self, layout: Layout) -> tuple[int, int]:
        """What was counted and what was measured of a layout that is like this one."""
        if (seen := self._seen.get(layout.kind)) is not None:
            return seen
        return 0, working_set(self._paces.of(layout).cost)


def working_set(cost: StepCost) -> int:
    """The bytes that are allocated besides what a layout stores, as a guess."""
    return 4 * cost.carry + 2 * cost.ct_consts + 3 * cost.residuals
