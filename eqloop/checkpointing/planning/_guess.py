"""What layouts take, told from those of which the program was compiled."""

from collections.abc import Hashable

from ..engine._layout import Layout, Nested, Revolved
from ._cost import StepCost
from ._stored import stored_bytes, working_set


class Guess:
    """The bytes that a layout takes, as far as is known.

    XLA makes programs of a kind of layouts that are alike. What one of them takes, more
    or less than was counted, another will take, too.
    """

    def __init__(self, cost: StepCost):
        self._cost = cost
        self._known: dict[Layout, int] = {}
        self._seen: dict[Hashable, tuple[int, int]] = {}

    def __call__(self, layout: Layout) -> int:
        """The bytes of a layout: those that were measured, or the guess."""
        if layout in self._known:
            return self._known[layout]
        stored = stored_bytes(self._cost, layout)
        counted, measured = self._like(layout)
        if measured < counted:
            return stored * measured // max(counted, 1)
        return stored + measured - counted

    def learn(self, layout: Layout, measured: int) -> None:
        """Takes note of what was measured."""
        self._known[layout] = measured
        seen = (stored_bytes(self._cost, layout), measured)
        # What was seen last is nearest to what is looked for.
        self._seen[_kind(layout)] = seen

    def knows(self, layout: Layout) -> bool:
        """Whether a layout was measured."""
        return layout in self._known

    def knows_kind(self, layout: Layout) -> bool:
        """Whether one of its kind was measured."""
        return _kind(layout) in self._seen

    def _like(self, layout: Layout) -> tuple[int, int]:
        """What was counted and what was measured of a layout that is like this one."""
        if (seen := self._seen.get(_kind(layout))) is not None:
            return seen
        return 0, working_set(self._cost)


def _kind(layout: Layout) -> Hashable:
    """What programs are made alike of."""
    is_single = layout.block == 1
    match layout:
        case Revolved():
            return "revolved", is_single, layout.missing > 0
        case Nested():
            depth = min(max(len(nest.levels) for nest in layout.nests), 3)
            return "nested", is_single, depth
        case _:
            return "stored"
