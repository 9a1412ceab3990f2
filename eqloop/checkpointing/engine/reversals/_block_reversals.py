"""Reversals: how a block of steps is taken back, given the carry before it.

An order calls a reversal in one of three ways, by what it has stored of the steps:

- `reversal(...)`: the carry before a block;
- `reversal.each(...)`: the carry before every step;
- `reversal.rerun(...)`: steps that are run again, to store all of their carries
  (`_reruns.py`). Then it goes on as in `each`.

To take blocks back in another way, subclass `AbstractReversal` in a file of its own.
"""

import abc
import dataclasses
from collections.abc import Hashable, Sequence

from jax import lax

from ...._arrays import Arrays
from ...._types import Index
from .._costs import Rates, StepCost, residuals_time, reversal_time
from .._sweep import Cotangents, Sweep
from ..slots._slots import DeviceSlots, StoredSteps
from ._reruns import AbstractRerun, Segment


class AbstractReversal(abc.ABC):
    """How a block of steps is taken back: a frozen, hashable dataclass."""

    @abc.abstractmethod
    def __call__(
        self, sweep: Sweep, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past a block.

        Args:
            sweep: The sweep.
            carry: The carry before the block.
            start: The position of its first step.
            count: How many steps it has.
            cts: The cotangents after the block.
        """

    def each(self, sweep: Sweep, steps: StoredSteps, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps whose carries are all stored: one by one."""
        return one_by_one(sweep, steps, cts)

    def rerun(self, sweep: Sweep, steps: AbstractRerun, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps that are run again, to store all their carries.

        Args:
            sweep: The sweep.
            steps: The steps.
            cts: The cotangents after the last step.
        """
        return self.each(sweep, steps.stored(sweep), cts)

    @property
    def kind(self) -> Hashable:
        """What programs of similar reversals have in common, see `Layout.kind`."""
        return type(self)

    @property
    def start(self) -> float:
        """Roughly the time that a loop takes apart from its blocks, in nanoseconds."""
        return 0.0

    @property
    def stores_residuals(self) -> bool:
        """Whether the residuals of a block are stored, as far as the policy allows."""
        return False

    def batch(self, count: int) -> int:
        """How many steps are linearised at once in blocks of `count` steps."""
        return count

    def described(self, block: int) -> list[tuple[str, str]]:
        """How blocks of this size are taken back, as rows of a plan's table."""
        return []

    @abc.abstractmethod
    def block_bytes(self, cost: StepCost, count: int) -> int:
        """The bytes that a block takes while it is reversed."""

    def bytes_of_blocks(self, cost: StepCost, counts: Sequence[int]) -> int:
        """The bytes of blocks that are reversed by several loops, one after the other.

        XLA does not share memory between the residuals of these loops.
        """
        return sum(self.block_bytes(cost, count) for count in counts)

    @abc.abstractmethod
    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        """Roughly the time that the reversal of a block takes, in nanoseconds."""


def one_by_one(sweep: Sweep, steps: StoredSteps, cts: Cotangents) -> Cotangents:
    """Takes cotangents past steps whose carries are all stored, one at a time."""

    def body(i: Index, cts: Cotangents) -> Cotangents:
        i = steps.count - 1 - i
        carry = steps.carries.read(steps.row + i)
        return sweep.take(carry, steps.start + i, 1, cts)

    unroll = min(sweep.loop.unroll, steps.most)
    return lax.fori_loop(0, steps.count, body, cts, unroll=unroll)


@dataclasses.dataclass(frozen=True)
class ByResiduals(AbstractReversal):
    """JAX's own derivative of a block stores the residuals of all of its steps."""

    def __call__(
        self, sweep: Sweep, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        if count == 1 or sweep.back.takes_blocks:
            return sweep.take(carry, start, count, cts)
        # A derivative of a gradient goes back step by step. JAX could differentiate the
        # block here, too. But on JAX 0.10, the second derivative of a scan forgets a
        # `custom_jvp` rule that calls the function it belongs to.
        steps = Segment(DeviceSlots(), start, carry, count, count)
        return one_by_one(sweep, steps.stored(sweep), cts)

    @property
    def stores_residuals(self) -> bool:
        return True

    def block_bytes(self, cost: StepCost, count: int) -> int:
        if count == 1:
            return 0
        # A block has its own sum of the consts' cotangents, and a copy of its part of
        # `xs` and of the cotangents of `ys`.
        per_step = cost.residuals + cost.x + cost.ct_x + cost.ct_y
        return cost.ct_consts + count * per_step

    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        # Every step is evaluated once more when it is reversed.
        step = cost.evaluation + reversal_time(cost, rate)
        if count == 1:
            return step
        # The cotangents of the consts are first added up within the block.
        entry = (6 * cost.ct_consts + 4 * cost.carry) * rate.byte + 100 * rate.iteration
        stored = residuals_time(cost, rate, count) + 2 * rate.iteration
        return entry + count * (step + stored)
