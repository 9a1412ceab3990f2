"""Loops with a progress bar: where in them it is told how far they have come.

Nothing is asked at each step, if it can be helped: a loop is run in blocks of steps,
and it is told after each of them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..._partition import Arrays
from ...progress import Gauge, tied
from ._loop import Loop
from ._scan import Body, scan


def metered_scan(
    body: Body,
    state: Any,
    xs: Arrays,
    loop: Loop,
    inputs: Sequence[Arrays],
    before: Callable[[Any, Any], Any] | None = None,
) -> tuple[Any, Any, list[Any]]:
    """`scan` of a state whose second entry is the carry, and its bar if it has one.

    Args:
        body: The step.
        state: What the first step gets.
        xs: What is scanned along the leading axis, if anything is. If there is
            something, a block is one step.
        loop: The loop.
        inputs: What the body gets, in lists.
        before: What is done to the state before each block of steps, given the position
            and how many steps it has. If there is something, a block is one step.

    Returns:
        The number of the bar, if there is one, and what `scan` returns.
    """
    if loop.meter is None:
        return None, *scan(body, state, xs, loop)
    alone = not xs and before is None
    gauge, block = loop.meter.here, _block(loop) if alone else 1

    def run(told: tuple[Any, Any, Any], xs: list[Any]) -> tuple[Any, list[Any]]:
        number, position, state = told
        if before is not None:
            state = before(state, position)
        step = body if block == 1 else lambda s, xs: scan(body, s, xs, loop.part(block))
        state, ys = step(state, xs)
        position = position + block
        if gauge is not None:
            y = ys if block == 1 else [y[0 if loop.reverse else -1] for y in ys]
            number = gauge.report_if_due(number, position, block, state[1], y)
        return (number, position, state), ys

    number = (
        None if gauge is None else gauge.open([x for group in inputs for x in group])
    )
    told = (number, jnp.zeros((), jnp.int32), state)
    (number, _, state), ys = scan(run, told, xs, loop.in_blocks(block))
    return number, state, ys if block == 1 else list(map(_join, ys))


def _block(loop: Loop) -> int:
    """How many steps to run at once: as many as divide the length, and `every`.

    So the bar moves when it is to, the step is in the program but once, and there are
    no outputs of a rest to be put behind the others, which would copy them.
    """
    if loop.meter is None or loop.kept is not None:
        return 1
    return math.gcd(loop.length, loop.meter.every)


def hops(
    gauge: Gauge | None,
    number: Any,
    state: Any,
    stop: Any,
    run: Callable[[Any, Any], Any],
    y_of: Callable[[Any], Arrays] = lambda state: [],
) -> tuple[Any, Any]:
    """Runs a loop whose length is not static, and tells how far it has come.

    Args:
        gauge: The bar, if there is one.
        number: What the report before this one returned.
        state: The position, the carry, and so on.
        stop: The position to run to.
        run: From a state and a position to the state at that position.
        y_of: Finds the outputs of the last step.

    Returns:
        The number to hand on, and the state at the last position.
    """
    if gauge is None:
        return number, run(state, stop)

    def hop(told: tuple[Any, Any]) -> tuple[Any, Any]:
        number, state = told
        position = state[0]
        due = position + gauge.every - position % gauge.every
        state = run(state, jnp.minimum(due, stop))
        done, carry, y = state[0], state[1], y_of(state)
        number = gauge.report_if_due(number, done, done - position, carry, y)
        return number, tied(number, state)

    return lax.while_loop(lambda told: told[1][0] < stop, hop, (number, state))


def _join(y: Any) -> Any:
    return lax.reshape(y, (y.shape[0] * y.shape[1], *y.shape[2:]))
