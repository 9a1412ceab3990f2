"""Reverses loops whose way back reads nothing but counters: they need no slots.

A counter is an integer of the carry that each step adds the same number to, such as the
index of the row to write next. Its value before step `i` is `start + i * stride`. So
only the initial carry is stored, and no step is run again.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, pick
from ..._types import Index
from ..engine._layout import Needs
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.leaves._rows_once import counter_strides


def strides_of(step: Step, needs: Needs) -> tuple[int, ...] | None:
    """The strides of the leaves that slots hold, if all of these are counters."""
    found = pick(counter_strides(step)[1:], needs.held)
    strides = tuple(stride for stride in found if stride is not None)
    return strides if len(strides) == len(found) else None


def reverse_by_counters(
    sweep: Sweep, strides: Sequence[int], init: Arrays, cts: Cotangents
) -> Cotangents:
    """Takes cotangents back to the start of a loop.

    Args:
        sweep: The way back.
        strides: What a step adds to each leaf of the carry.
        init: The initial carry.
        cts: The cotangents at the end.
    """
    pairs = list(zip(init, strides, strict=True))

    def back(i: Index, cts: Cotangents) -> Cotangents:
        position = sweep.steps - 1 - i
        # Computed from the position, and not counted down: so the loop carries nothing
        # but cotangents.
        carry = [c + jnp.asarray(position * n, c.dtype) for c, n in pairs]
        return sweep.pull(carry, position, 1, cts)

    return lax.fori_loop(0, sweep.steps, back, cts)
