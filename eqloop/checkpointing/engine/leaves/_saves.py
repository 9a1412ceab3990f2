"""Which leaves of which carries a loop stores for its way back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from ...._arrays import Flags, pick, split, union
from ...._types import Value
from .._layout import AbstractLayout

_L = TypeVar("_L", bound=AbstractLayout, covariant=True)


class Needs(NamedTuple):
    """The leaves of the carries that a reverse sweep needs.

    The carry here lacks the first `AbstractRepetition.lead` leaves.

    Attributes:
        held: Which leaves slots hold.
        final: Which leaves are stored once, as they are after the last step. For
            buffers whose rows are written once, that is enough (`_rows_once.py`).
    """

    held: Flags
    final: Flags

    @property
    def total(self) -> int:
        """How many arrays that is."""
        return sum(self.held) + sum(self.final)

    def with_those_of(self, other: "Needs") -> "Needs":
        """The leaves that at least one of two sweeps needs."""
        pairs = zip(self, other, strict=True)
        return Needs(*(tuple(union(*pair)) for pair in pairs))

    def changed(self, change: Callable[[Flags], Sequence[bool]]) -> "Needs":
        """The same after a change of the leaves of the carry."""
        return Needs(*(tuple(change(flags)) for flags in self))

    def serves(self, other: "Needs") -> bool:
        """Whether a sweep that needs others finds all of them among these.

        What it needs in slots has to be in slots. What it needs once may be in either:
        a leaf that slots hold need not be made from the last carry.
        """
        known = tuple(union(self.held, self.final))
        of_slots, of_known = union(self.held, other.held), union(known, other.final)
        return tuple(of_slots) == self.held and tuple(of_known) == known


@dataclasses.dataclass(frozen=True)
class Saves(Generic[_L]):
    """What a loop stores for its reversal.

    Attributes:
        layout: Which carries are stored, and where.
        needs: Which leaves of these carries, and of the last one.
    """

    layout: _L
    needs: Needs

    @property
    def held(self) -> Flags:
        """Which leaves of a carry the slots hold."""
        return self.needs.held

    @property
    def at_primal(self) -> Self | None:
        """The same for the primal: `None` if its slots do not outlast it."""
        return self if self.layout.slots.outlast_primal else None

    @property
    def given(self) -> Needs | None:
        """The leaves that the reverse sweep gets; `None` if it has to run the loop."""
        return self.needs if self.layout.slots.outlast_primal else None

    def of_last(self, carry: Sequence[Value]) -> list[Value]:
        """The leaves of the last carry that are stored."""
        final = self.needs.final
        # The carry may have more leaves at its start, see `lead`.
        return pick(carry[len(carry) - len(final) :], final)

    def of_these(
        self, saved: Sequence[Value], fewer: "Saves[AbstractLayout]"
    ) -> list[Value]:
        """The part of what was stored for another sweep, which needs fewer leaves.

        Args:
            saved: All that was stored: integers, slots, leaves of the last carry.
            fewer: What the other sweep needs.
        """
        if self.at_primal is None:
            return []
        held, final = self.needs
        numbers, slots, last = split(saved, len(saved) - self.needs.total, sum(held))
        slots = pick(slots, pick(fewer.needs.held, held))
        return [*numbers, *slots, *pick(last, pick(fewer.needs.final, final))]

    def of_leaves(self, change: Callable[[Flags], Sequence[bool]]) -> Self:
        """The same after a change of the leaves of the carry."""
        return dataclasses.replace(self, needs=self.needs.changed(change))

    def with_leaves(self, count: int) -> Self:
        """The same for a carry with more leaves at its end, which are not stored."""
        return self.of_leaves(lambda flags: (*flags, *[False] * count))
