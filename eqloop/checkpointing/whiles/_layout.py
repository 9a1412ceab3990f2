"""How loops of unknown length are planned, in plain Python, no JAX."""

import dataclasses
from typing import Any

from ..engine import _binomial
from ..engine._layout import Nested
from ..engine._levels import nests

# As far as a counter of 32 bits goes, which is further than any loop.
UNLIMITED = 2**31 - 1
# No step is run again more often than this, however long the loop and few the slots;
# with two slots it is enough for a million steps.
_MOST_RANKS = 1500


@dataclasses.dataclass(frozen=True)
class Forward:
    """A loop that has no reverse mode, since it may have any number of steps."""

    max_steps: int = UNLIMITED

    def layout(self, problem: Any, active: Any) -> Nested:
        raise ValueError(
            "WhileLoop cannot be differentiated in reverse mode (`jax.grad`, "
            "`jax.vjp`), as that needs memory for a number of steps that is unknown. "
            "Use `el.BoundedWhileLoop(cond, body, max_steps=...)` if there is a bound "
            "on the number of steps, `el.CheckpointedWhileLoop(cond, body)` if there "
            "is none, or forward mode (`jax.jvp`, `jax.jacfwd`)."
        )


@dataclasses.dataclass(frozen=True)
class Bounded:
    """Nested levels for as many steps as there may be, of which the first are run."""

    max_steps: int
    base: int

    def layout(self, problem: Any, active: Any) -> Nested:
        return Nested(nests(self.max_steps, self.base))


@dataclasses.dataclass(frozen=True)
class Online:
    """Slots that are moved on as the loop turns out to be longer.

    It is a layout as well, the same for every derivative.

    Attributes:
        max_steps: The most steps that are run.
        slots: How many carries are stored at once.
    """

    max_steps: int
    slots: int

    def layout(self, problem: Any, active: Any) -> Any:
        return self

    @property
    def ranks(self) -> int:
        """The highest rank that a segment may come to have, see `_spread.py`."""
        if self.slots == 1:
            return 1
        return min(_binomial.rank_of(self.max_steps, self.slots) + 1, _MOST_RANKS)

    @property
    def reach(self) -> list[list[int]]:
        """For numbers of slots and of ranks the longest chain, cut to fit.

        The columns start at rank -1.
        """
        if self.slots == 1:
            return [[0], [0]]  # nothing is ever split
        return [
            [min(_binomial.reach(k, r), UNLIMITED) for r in range(-1, self.ranks + 1)]
            for k in range(self.slots + 1)
        ]
