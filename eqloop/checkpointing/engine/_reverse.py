"""The reverse sweep from the slots that a forward sweep has saved."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._lists import Arrays
from ._layout import Nested, Revolved
from ._levels import Nest
from ._revolve import reverse_chain
from ._slots import new_slots, write
from ._sweep import Cotangents, Sweep


def reverse(
    sweep: Sweep,
    layout: Nested | Revolved,
    slots: Arrays,
    ct_carry: Arrays,
    stop: Any = None,
) -> Cotangents:
    """Takes the cotangents of the outputs back to those of the inputs.

    Args:
        sweep: The loop, and which of its inputs are differentiated.
        layout: How the loop was cut.
        slots: The carries that were saved.
        ct_carry: The cotangents of the active leaves of the final carry.
        stop: How many of the steps were run, if a nested loop may have stopped early.
    """
    if not layout.is_flat:
        sweep = sweep.opaque()
    cts = sweep.start(ct_carry, slots)
    if isinstance(layout, Revolved):
        return reverse_chain(sweep, layout, slots, cts)
    return _reverse_nests(sweep, layout.nests, slots, cts, stop)


def _reverse_nests(
    sweep: Sweep, nests: Sequence[Nest], slots: Arrays, cts: Cotangents, stop: Any
) -> Cotangents:
    position = sum(nest.length for nest in nests)
    row = sum(nest.levels[0] for nest in nests)
    for nest in reversed(nests):
        position, row = position - nest.length, row - nest.levels[0]
        cts = _reverse_level(sweep, nest, position, slots, row, cts, stop)
    return cts


def _reverse_level(
    sweep: Sweep,
    nest: Nest,
    start: Any,
    slots: Arrays,
    row: int,
    cts: Cotangents,
    stop: Any,
) -> Cotangents:
    """Reverses a nest whose outermost carries lie in `slots` from a row on."""
    count, (_, *inner) = _count(nest, start, stop), nest.levels

    def body(i: Any, cts: Cotangents) -> Cotangents:
        segment = count - 1 - i
        position = start + segment * nest.stride
        carry = sweep.carry(slots, row + segment)
        if not inner:
            return sweep.pull(carry, position, nest.block, cts)
        within = Nest(tuple(inner), nest.block)
        filled = _fill(sweep, carry, position, within, stop)
        return _reverse_level(sweep, within, position, filled, 0, cts, stop)

    unroll = 1 if inner else min(sweep.loop.unroll, nest.levels[0])
    return lax.fori_loop(0, count, body, cts, unroll=unroll)


def _fill(sweep: Sweep, carry: Arrays, start: Any, nest: Nest, stop: Any) -> list[Any]:
    """The carries at the start of each outermost segment of a nest."""

    def body(i: Any, state: tuple[list[Any], list[Any]]) -> Any:
        carry, slots = state
        carry = sweep.walk.advance(carry, start + i * nest.stride, nest.stride)
        return carry, write(slots, carry, i + 1)

    rows = nest.levels[0]
    slots = new_slots(carry, rows)
    unroll = max(min(sweep.loop.unroll, rows - 1), 1) if nest.stride == 1 else 1
    count = _count(nest, start, stop) - 1
    return lax.fori_loop(0, count, body, (list(carry), slots), unroll=unroll)[1]


def _count(nest: Nest, start: Any, stop: Any) -> Any:
    """How many of the outermost segments of a nest have steps that were run."""
    count = nest.levels[0]
    if stop is None:
        return count
    left = stop - jnp.asarray(start, stop.dtype) + (nest.stride - 1)
    return jnp.clip(lax.div(left, jnp.asarray(nest.stride, left.dtype)), 0, count)
