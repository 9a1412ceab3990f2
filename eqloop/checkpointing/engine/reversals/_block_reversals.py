"""Reversals: how a block of steps is taken back, given the carry before it.

An order calls a reversal in one of three ways, by what it has stored of the steps:

- `reversal(...)`: the carry before a block;
- `reversal.each(...)`: the carry before every step;
- `reversal.rerun(...)`: steps that are run again, to store all of their carries.
  Then it goes on as in `each`.

To take blocks back in another way, subclass `AbstractReversal` (`_sweep.py`) in a file
of its own.
"""

import dataclasses

from jax import lax

from ...._arrays import Arrays, stack_type, zero_array
from ...._programs import run
from ...._types import Index, PyTree
from ...steps._loop import store
from .._costs import Rates, StepCost, residuals_time, reversal_time
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import DeviceSlots
from ..slots._stored_steps import StepsToRun, StoredSteps
from ._known_products import Products


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
        steps = StepsToRun(DeviceSlots(), start, carry, count, count)
        return sweep.one_by_one(run_again(sweep, steps), cts)

    def rerun(self, sweep: Sweep, steps: StepsToRun, cts: Cotangents) -> Cotangents:
        return self.each(sweep, run_again(sweep, steps), cts)

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


def run_again(
    sweep: Sweep, steps: StepsToRun, products: Products | None = None
) -> StoredSteps:
    """Runs steps, and stores the carry before each, and products if they are kept."""
    slots, start, most = steps.slots, steps.start, steps.most
    if products is None:
        move = lambda i, carry: sweep.next(carry, start + i)
        # One move less than steps: the first carry is there. The last step is not run.
        unroll = max(min(sweep.loop.unroll, most - 1), 1)
        filled = slots.filled(steps.carry, most)
        carries = filled.run_on(steps.carry, steps.count, move, unroll)
        return StoredSteps(carries, 0, start, steps.count, most)

    # Both the step and the program of its products compute the products. The two are
    # next to each other, so XLA merges them.
    def body(i: Index, state: PyTree) -> PyTree:
        carry, carries, rows = state
        x = sweep.loop.x(sweep.xs, sweep.position(start + i))
        values = run(products.program, *sweep.consts, *carry, *x)
        rows = [store(row, v, i) for row, v in zip(rows, values, strict=True)]
        carry, carries = sweep.next(carry, start + i), carries.write(carry, i)
        return carry, carries, rows

    rows = [zero_array(stack_type(aval, most)) for aval in products.types]
    state = list(steps.carry), slots.filled(steps.carry, most), rows
    unroll = min(sweep.loop.unroll, most)
    _, carries, rows = lax.fori_loop(0, steps.count, body, state, unroll=unroll)
    return StoredSteps(carries, 0, start, steps.count, most, rows)
