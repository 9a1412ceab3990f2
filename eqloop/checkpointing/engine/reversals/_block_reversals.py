"""Reversals: how a block of steps is taken back, given the carry before it.

To take blocks back in another way, subclass `AbstractReversal` in a file of its own.
"""

import abc
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from jax import lax

from ...._partition import Arrays
from ...._types import Index
from .._costs import Rates, StepCost, residuals_time, reversal_time
from ..slots._slots import Carries, DeviceSlots, StoredSteps

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
    carries = carries_within(sweep, carry, start, count)

    def back(i: Index, cts: "Cotangents") -> "Cotangents":
        i = count - 1 - i
        return sweep.take(carries.read(i), start + i, 1, cts)

    return lax.fori_loop(0, count, back, cts)


def carries_within(
    sweep: "Sweep", carry: Arrays, start: Index, count: int, run: Index | None = None
) -> Carries:
    """The carry before each step of a block, given the first of them.

    Args:
        sweep: The loop.
        carry: The first of them.
        start: The position of the block.
        count: How many steps it has.
        run: How many of these were run, if that is not all.
    """
    run = count if run is None else run
    move = lambda i, carry: sweep.next(carry, start + i)
    return DeviceSlots().filled(carry, count).run_on(carry, run, move)
