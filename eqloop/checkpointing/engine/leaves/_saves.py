"""What a loop leaves for its way back: which leaves of which carries."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from ...._arrays import Flags, pick, split, union
from ...._types import Value
from .._layout import AbstractLayout

_L = TypeVar("_L", bound=AbstractLayout, covariant=True)


class Needs(NamedTuple):
    """The leaves of the carries that a reverse sweep needs.

    Those by which a loop goes on are not counted (`AbstractRepetition.lead`).

    Attributes:
        held: Which leaves slots hold.
        final: Which leaves are saved once, as they are after the last step.
    """

    held: Flags
    final: Flags

    @property
    def total(self) -> int:
        """How many leaves that is."""
        return sum(self.held) + sum(self.final)

    def with_those_of(self, other: "Needs") -> "Needs":
        """What two ways back need together."""
        pairs = zip(self, other, strict=True)
        return Needs(*(tuple(union(*pair)) for pair in pairs))

    def changed(self, change: Callable[[Flags], Sequence[bool]]) -> "Needs":
        """The same for a carry of other leaves."""
        return Needs(*(tuple(change(flags)) for flags in self))

    def serves(self, other: "Needs") -> bool:
        """Whether a way back that needs others finds them among these."""
        known = tuple(union(self.held, self.final))
        of_slots, of_known = union(self.held, other.held), union(known, other.final)
        return tuple(of_slots) == self.held and tuple(of_known) == known


@dataclasses.dataclass(frozen=True)
class Saves(Generic[_L]):
    """What a loop leaves for its reversal.

    Attributes:
        layout: Which carries are stored, and where.
        needs: Which leaves of them, and of the last carry.
    """

    layout: _L
    needs: Needs

    @property
    def held(self) -> Flags:
        """Which leaves of a carry the slots hold, of those that the way back knows."""
        return self.needs.held

    @property
    def at_primal(self) -> Self | None:
        """What the primal leaves of it: all, or nothing where its slots do not last."""
        return self if self.layout.slots.outlast_primal else None

    @property
    def given(self) -> Needs | None:
        """Which leaves the way back is given; `None` if it runs the loop for them."""
        return self.needs if self.layout.slots.outlast_primal else None

    def of_last(self, carry: Sequence[Value]) -> list[Value]:
        """The leaves of the last carry that are saved."""
        final = self.needs.final
        return pick(carry[len(carry) - len(final) :], final)

    def of_these(
        self, saved: Sequence[Value], fewer: "Saves[AbstractLayout]"
    ) -> list[Value]:
        """The part of what is saved that another way back takes, of fewer leaves."""
        if self.at_primal is None:
            return []
        held, final = self.needs
        numbers, slots, last = split(saved, len(saved) - self.needs.total, sum(held))
        slots = pick(slots, pick(fewer.needs.held, held))
        return [*numbers, *slots, *pick(last, pick(fewer.needs.final, final))]

    def of_leaves(self, change: Callable[[Flags], Sequence[bool]]) -> Self:
        """The same for a carry of other leaves."""
        return dataclasses.replace(self, needs=self.needs.changed(change))

    def with_leaves(self, count: int) -> Self:
        """The same for a carry with so many leaves behind it, which are not held."""
        return self.of_leaves(lambda flags: (*flags, *[False] * count))
