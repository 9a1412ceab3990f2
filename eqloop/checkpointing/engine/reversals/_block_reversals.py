"""Reversals: how a block of steps is taken back, given the carry before it.

To take blocks back in another way, subclass `AbstractReversal` in a file of its own.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from jax import lax

from ...._arrays import Arrays
from ...._types import Index
from .._costs import Rates, StepCost, residuals_time, reversal_time
from ..slots._slots import AbstractSlots, Carries, DeviceSlots, StoredSteps

if TYPE_CHECKING:
    from .._sweep import Cotangents, Sweep


class AbstractReversal(abc.ABC):
    """How a block of steps is taken back: a frozen, hashable dataclass."""

    @abc.abstractmethod
    def __call__(
        self, sweep: "Sweep", carry: Arrays, start: Index, count: int, cts: "Cotangents"
    ) -> "Cotangents":
        """Takes cotangents past a block.

        Args:
            sweep: The loop, and what is done to its steps.
            carry: The carry before the block.
            start: The position of its first step.
            count: How many steps it has.
            cts: The cotangents behind it.
        """

    def each(
        self, sweep: "Sweep", steps: StoredSteps, cts: "Cotangents"
    ) -> "Cotangents":
        """Takes cotangents past steps whose carries are all stored: one by one."""
        return one_by_one(sweep, steps, cts)

    def rerun(
        self,
        sweep: "Sweep",
        slots: AbstractSlots,
        carry: Arrays,
        start: Index,
        count: Index,
        most: int,
        cts: "Cotangents",
    ) -> "Cotangents":
        """Takes cotangents past steps that are run again, to store all their carries.

        Args:
            sweep: The loop.
            slots: What the carries are stored in.
            carry: That before the first step.
            start: The position of that.
            count: How many steps there are.
            most: How many there are at most.
            cts: The cotangents behind them.
        """
        carries = carries_within(sweep, slots, carry, start, count, most)
        return self.each(sweep, StoredSteps(carries, 0, start, count, most), cts)

    def past(
        self,
        sweep: "Sweep",
        take: Callable[["Cotangents"], "Cotangents"],
        start: Index,
        count: int,
        cts: "Cotangents",
    ) -> "Cotangents":
        """Takes cotangents past a block by a function, after which a bar may move."""
        return take(cts)

    @property
    def kind(self) -> Hashable:
        """Reversals of one kind make programs that are alike."""
        return type(self)

    @property
    def start(self) -> float:
        """What a loop takes besides its blocks, roughly, in nanoseconds."""
        return 0.0

    @property
    def stores_residuals(self) -> bool:
        """Whether the residuals of a block are stored, as far as a policy allows it."""
        return False

    def batch(self, count: int) -> int:
        """How many steps of a block of so many are linearised at once."""
        return count

    def described(self, block: int) -> list[tuple[str, str]]:
        """How blocks of so many steps are taken back, as rows of a plan's table."""
        return []

    @abc.abstractmethod
    def block_bytes(self, cost: StepCost, count: int) -> int:
        """The bytes that a block takes while it is reversed."""

    def bytes_of_blocks(self, cost: StepCost, counts: Sequence[int]) -> int:
        """The bytes of blocks that are reversed by loops one after the other.

        XLA gives each of these loops room of its own for residuals.
        """
        return sum(self.block_bytes(cost, count) for count in counts)

    @abc.abstractmethod
    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        """How long it takes to take a block back, roughly, in nanoseconds."""


def one_by_one(sweep: "Sweep", steps: StoredSteps, cts: "Cotangents") -> "Cotangents":
    """Takes cotangents past steps whose carries are all stored, one at a time."""

    def body(i: Index, cts: "Cotangents") -> "Cotangents":
        i = steps.count - 1 - i
        carry = steps.carries.read(steps.row + i)
        return sweep.pull(carry, steps.start + i, 1, cts)

    unroll = min(sweep.loop.unroll, steps.most)
    return lax.fori_loop(0, steps.count, body, cts, unroll=unroll)


@dataclasses.dataclass(frozen=True)
class ByResiduals(AbstractReversal):
    """The residuals of the whole block are stored, by JAX's own derivative of it."""

    def __call__(
        self, sweep: "Sweep", carry: Arrays, start: Index, count: int, cts: "Cotangents"
    ) -> "Cotangents":
        if count > 1 and not sweep.back.takes_blocks:
            return _step_by_step(sweep, carry, start, count, cts)
        return sweep.take(carry, start, count, cts)

    @property
    def stores_residuals(self) -> bool:
        return True

    def block_bytes(self, cost: StepCost, count: int) -> int:
        if count == 1:
            return 0
        # A block has its own cotangents of what all steps share, and its own part of
        # `xs` and of the cotangents of `ys`.
        per_step = cost.residuals + cost.x + cost.ct_x + cost.ct_y
        return cost.ct_consts + count * per_step

    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        # Every step is evaluated once more where it is reversed.
        step = cost.evaluation + reversal_time(cost, rate)
        if count == 1:
            return step
        # The cotangents of what steps share are first summed up within the block.
        entry = (6 * cost.ct_consts + 4 * cost.carry) * rate.byte + 100 * rate.iteration
        stored = residuals_time(cost, rate) + 2 * rate.iteration
        return entry + count * (step + stored)


def _step_by_step(
    sweep: "Sweep", carry: Arrays, start: Index, count: int, cts: "Cotangents"
) -> "Cotangents":
    """The carries of the block are stored, and its steps are taken back one by one.

    JAX would store residuals of the block here, too. But what it makes of a loop when
    it is differentiated twice is not always what it makes of the steps (JAX 0.10).
    """
    carries = carries_within(sweep, DeviceSlots(), carry, start, count, count)

    def back(i: Index, cts: "Cotangents") -> "Cotangents":
        i = count - 1 - i
        return sweep.take(carries.read(i), start + i, 1, cts)

    return lax.fori_loop(0, count, back, cts)


def carries_within(
    sweep: "Sweep",
    slots: AbstractSlots,
    carry: Arrays,
    start: Index,
    count: Index,
    most: int,
) -> Carries:
    """The carry before each of some steps, which are run again: see `rerun`."""
    move = lambda i, carry: sweep.next(carry, start + i)
    unroll = max(min(sweep.loop.unroll, most - 1), 1)
    return slots.filled(carry, most).run_on(carry, count, move, unroll)
