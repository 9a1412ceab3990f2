"""Reversals: how a block of steps is taken back, given the carry before it.

An order calls a reversal in one of three ways, by what it has stored of the steps:

- `reversal(...)`: the carry before a block;
- `reversal.each(...)`: the carry before every step;
- `reversal.rerun(...)`: steps that are run again, to store all of their carries.
  Then it goes on as in `each`.

To take blocks back in another way, subclass `AbstractReversal` (`_sweep.py`) in a file
of its own.

A segment runs again from its first carry, one step after the other. If the first
carries of several segments are there, these can run side by side, as one batch:

    one segment       s0 s1 s2 s3, and later s4 s5 s6 s7
    side by side      s0 s1 s2 s3
                      s4 s5 s6 s7

Each step of the loop is then a step of all of them. The product of a matrix and a
vector becomes one of two matrices, which reads the matrix once for all segments, and
small operations are started once. So to run steps again takes a part of the time that
it took to run them at first, where one had to wait for the other.

It gains: without segments side by side, what is planned for an H100 starts 1.15 times
as many kernels in the median, and up to 1.6 times as many. On a CPU, nothing is gained.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays, stack_type, zero_array
from ...._programs import run, unwatched
from ...._types import Index, PyTree, Value
from ...steps._loop import store
from .._costs import Rates, StepCost, residuals_time, reversal_time
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries, DeviceSlots
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
    is_one = steps.side_by_side is None
    ran = (_run if is_one else _run_side_by_side)(sweep, steps, products)
    count = steps.count if is_one else steps.most
    carries, rows = ran
    return StoredSteps(carries, 0, steps.start, count, steps.most, rows)


def _run(
    sweep: Sweep, steps: StepsToRun, products: Products | None
) -> tuple[Carries, list[Value]]:
    slots, start, most = steps.slots, steps.start, steps.most
    if products is None:
        move = lambda i, carry: sweep.next(carry, start + i)
        # One move less than steps: the first carry is there. The last step is not run.
        unroll = max(min(sweep.loop.unroll, most - 1), 1)
        filled = slots.filled(steps.carry, most)
        return filled.run_on(steps.carry, steps.count, move, unroll), []

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
    return carries, rows


def _run_side_by_side(
    sweep: Sweep, steps: StepsToRun, products: Products | None
) -> tuple[Carries, list[Value]]:
    loop, each = sweep.loop, steps.length
    axes = list(loop.x_axes[: len(sweep.xs)])
    block = loop.block(sweep.xs, sweep.position(steps.start), steps.most)

    def of_segment(carry: Arrays, xs: Arrays) -> tuple[Carries, list[Value]]:
        own = dataclasses.replace(sweep, loop=loop.part(each), xs=xs, first=None)
        segment = StepsToRun(steps.slots, 0, carry, each, each)
        # `block` has marked the steps. Positions within a segment mean nothing.
        with unwatched():
            return _run(own, segment, products)

    def cut(x: Value, axis: int) -> Value:
        """Splits the axis of all steps into one of segments, and one of their steps."""
        shape = steps.side_by_side, each
        return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])

    xs = list(map(cut, block, axes))
    if loop.reverse:  # the last segment comes first in `xs`
        xs = list(map(jnp.flip, xs, axes))
    # All segments have the same static length. So under `vmap` they are one loop with a
    # known number of trips, and nothing is selected.
    found = jax.vmap(of_segment, in_axes=(0, axes))(list(steps.carry), xs)
    return jax.tree.map(lambda row: row.reshape(-1, *row.shape[2:]), found)
