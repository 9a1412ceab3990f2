"""Consecutive steps whose carries are in slots, or will be once they have run again."""

import dataclasses

from ...._arrays import Arrays
from ...._types import Index, Value
from ._slots import AbstractSlots, Carries


@dataclasses.dataclass(frozen=True)
class StepsToRun:
    """Consecutive steps to run again, to store the carry before each of them.

    Attributes:
        slots: The slots to store the carries in.
        start: The position of the first step.
        carry: The carry before the first step.
        count: How many steps there are. It may be known only when they run.
        most: How many steps there are at most, which is known while tracing.
    """

    slots: AbstractSlots
    start: Index
    carry: Arrays
    count: Index
    most: int


@dataclasses.dataclass(frozen=True)
class StoredSteps:
    """Consecutive steps whose carries are all stored.

    Attributes:
        carries: The carries.
        row: The row of the carry before the first step.
        start: The position of the first step.
        count: How many steps there are. It may be known only when they run.
        most: How many steps there are at most, which is known while tracing.
        products: The known products of these steps, if any (`_known_products.py`). They
            are in the same rows as the carries.
    """

    carries: Carries
    row: Index
    start: Index
    count: Value
    most: int
    products: Arrays = ()

    def from_step(self, offset: Index, count: Index, most: int) -> "StoredSteps":
        """Some of these steps: `count` of them, from one on."""
        return dataclasses.replace(
            self,
            row=self.row + offset,
            start=self.start + offset,
            count=count,
            most=most,
        )
