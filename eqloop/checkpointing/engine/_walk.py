"""What an order is given: it says which steps are next, and this is how it is done.

An order knows positions, and which of its carries are stored. For the rest it has four
ways to move:

    advance    from a carry to a later one, by running steps again
    pull       past a block, from the carry before it
    each       past steps whose carries are all stored
    rerun      past steps that are run again, to store all of their carries
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays
from ..._types import Index, Value
from ._loop import zero
from ._sweep import Cotangents, Sweep
from .reversals._block_reversals import AbstractReversal, one_by_one
from .reversals._reruns import AbstractRerun, carries_within
from .slots._slots import DeviceSlots, StoredSteps


@dataclasses.dataclass(frozen=True)
class Walk:
    """The way back through a loop, by a reversal.

    Attributes:
        sweep: What the reversal is given: the loop, and the backward step.
        reversal: How a block is taken back.
    """

    sweep: Sweep
    reversal: AbstractReversal

    def of(self, **changes: Any) -> Self:
        """The same with another sweep, which differs in this."""
        return dataclasses.replace(
            self, sweep=dataclasses.replace(self.sweep, **changes)
        )

    def until(self, count: Index) -> Self:
        """The same for a loop that has run so many steps."""
        return self.of(count=count, gauge=self.sweep.gauge.of(count))

    def opaque(self) -> Self:
        """The same for nested loops, see `opaque` in `_loop.py`."""
        return dataclasses.replace(self, sweep=self.sweep.opaque())

    def part(self, start: Index) -> Self:
        """The same for a part of the loop: positions count from `start` on."""
        return dataclasses.replace(self, sweep=self.sweep.part(start))

    @property
    def count(self) -> Index | None:
        """How many steps were run, for a loop that may end early; else `None`."""
        return self.sweep.count

    @property
    def joins_steps(self) -> bool:
        """Whether steps can be reversed in batches, and all of them are run."""
        return self.sweep.count is None and self.sweep.back.joins_steps

    @property
    def unroll(self) -> int:
        """How many steps the innermost loops run per iteration."""
        return self.sweep.loop.unroll

    # From a carry to another one.

    def advance(self, carry: Arrays, start: Index, count: int) -> list[Value]:
        """The carry `count` steps after the position `start`; the count is static."""
        return self.sweep.advance(carry, start, count)

    def advance_to(self, carry: Arrays, start: Index, stop: Index) -> list[Value]:
        """The carry at the position `stop`; both positions are dynamic."""
        return self.sweep.advance_to(carry, start, stop)

    def previous(self, carry: Arrays, position: Index) -> list[Value]:
        """The carry before the step at a position, from the one after it."""
        return self.sweep.previous(carry, position)

    # Back past steps.

    def each(self, steps: StoredSteps, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps whose carries are all stored."""
        return self.reversal.each(self.sweep, steps, cts)

    def rerun(self, steps: AbstractRerun, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps that are run again, to store all their carries.

        Args:
            steps: The steps.
            cts: The cotangents after the last step.
        """
        return self.reversal.rerun(self.sweep, steps, cts)

    def pull(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past a block of `count` steps, given the carry before it."""
        # A loop that cannot end early has only whole blocks. The reversal runs them
        # from `carry`, and calls `sweep.take` or its own loops.
        sweep = self.sweep
        if count == 1 or sweep.count is None:
            return self.reversal(sweep, carry, start, count, cts)
        # The loop may have ended within this block, and then its steps are reversed one
        # by one. A `lax.cond` would copy the cotangents of `xs`, which both branches
        # return. So both ways are loops, of which one has no iteration.
        is_whole = (sweep.common(start, count) == count).astype(jnp.int32)
        whole = lambda _, cts: self.reversal(sweep, carry, start, count, cts)
        cts = lax.fori_loop(0, is_whole, whole, cts)
        left = jnp.where(is_whole, 0, jnp.clip(sweep.count - start, 0, count))
        # The steps of the block that were run, `left` of them, are run again. Their
        # carries go to as many slots as the block has steps, since `left` is not
        # static.
        carries = carries_within(sweep, DeviceSlots(), carry, start, left, count)
        return one_by_one(sweep, StoredSteps(carries, 0, start, left, count), cts)

    def pull_stored(self, cts: Cotangents) -> Cotangents:
        """Takes cotangents past the last steps, whose residuals are stored."""
        sweep, residuals = self.sweep, self.sweep.residuals
        assert residuals is not None
        last = sweep.loop.length - 1
        body = lambda i, cts: sweep.take_stored(last - i, cts)
        count = sweep.loop.length - residuals.first
        unroll = min(self.unroll, count)
        return lax.fori_loop(0, count, body, cts, unroll=unroll)

    def pull_first(self, carry: Arrays, count: int, cts: Cotangents) -> Cotangents:
        """Reverses the first `count` steps from the initial carry, if any step was run.

        It is for orders whose first block is not like the others.
        """

        def pull(i: Index, cts: Cotangents) -> Cotangents:
            # XLA does not know that this loop has one iteration at most, and would
            # hoist the evaluation of the steps out of it: the initial carry does not
            # change. All residuals would be kept from before the loop on. The barrier
            # makes the carry depend on the index.
            # There is one for each leaf. On JAX 0.10, all that a barrier returns
            # differs between devices if anything that it is given does, and the step
            # may not expect that of a counter.
            held = [lax.optimization_barrier((i, leaf))[1] for leaf in carry]
            return self.pull(held, i, count, cts)

        if self.count is None:
            return self.pull(carry, zero(), count, cts)
        # A loop of at most one iteration, as in `pull`.
        return lax.fori_loop(0, jnp.clip(self.count, 0, 1), pull, cts)
