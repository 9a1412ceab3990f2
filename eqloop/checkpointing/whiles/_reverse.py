"""The reverse sweep of a loop, when it is known how many steps it had."""

import functools
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import partial_eval

from ..._lists import Arrays
from ..engine import _reverse
from ..engine._constant import constant
from ..engine._layout import Nested
from ..engine._revolve import Chain, Stack
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ._layout import Online
from ._spread import appended


@functools.lru_cache(maxsize=128)
def unconditional(step: Step) -> Step:
    """The step without the first leaf of its carry, and without what it is made by."""
    kept = [True] * len(step.jaxpr.in_avals)
    kept[step.num_consts] = False
    jaxpr, _ = partial_eval.dce_jaxpr(
        step.jaxpr.jaxpr,
        [False] + [True] * (step.num_carry - 1),
        instantiate=kept,
    )
    closed = jex.ClosedJaxpr(jaxpr, step.jaxpr.consts)
    return Step(closed, step.num_consts, step.num_carry - 1)


def reverse(
    sweep: Sweep, layout: Nested | Online, saved: Arrays, ct_carry: Arrays
) -> Cotangents:
    """Takes the cotangents of the final carry back, given what `forward` saved."""
    if isinstance(layout, Nested):
        count, *slots = saved
        return _reverse.reverse(sweep, layout, slots, ct_carry, stop=count)
    count, starts, rows, *slots = saved
    reach = constant(layout.reach)
    order = appended(rows, layout.slots)
    chain = Chain(sweep, layout.slots - 1, reach, order=order)
    stack = _stack(layout, reach, count, starts, slots)
    return chain.reverse(stack, count - 1, 0, sweep.start(ct_carry, slots))[1]


def _stack(layout: Online, reach: Any, count: Any, starts: Any, slots: Any) -> Stack:
    """The slots as the primal leaves them; if there were few steps, some are free."""
    places = jnp.arange(layout.slots, dtype=jnp.int32)
    # Behind the slots in use this is nonsense, and is not read.
    lengths = appended(starts[1:], count) - starts
    longest = reach[layout.slots - places, 1:]
    ranks = jnp.sum(longest < lengths[:, None], axis=1, dtype=jnp.int32)
    table = jnp.stack([starts, ranks], axis=1)
    top = jnp.clip(count - 1, 0, layout.slots - 1)
    start, rank = table[top]
    return Stack(top, start, rank, table, list(slots))
