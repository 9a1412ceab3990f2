"""Loops that report how far they have come, so that their bars move.

Whoever runs a loop passes its body, or its way back, to one of these functions. They
run it with reports in it, or as it is if there is no bar. The number of the bar is one
more entry of what the loop carries.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._arrays import Arrays
from .._types import Index, PyTree, Value
from ._meter import Gauge, tied


def scan_with_bar(
    scan: Callable[..., tuple[PyTree, list[Value]]],
    body: Callable[..., tuple[PyTree, list[Value]]],
    state: PyTree,
    xs: Arrays,
    loop: Any,
    after: Arrays,
    may_cut: bool,
) -> tuple[PyTree, list[Value]]:
    """Runs a scan, and its bar.

    Nothing is asked at each step if it can be helped: the loop is run in blocks of as
    many steps as divide both its length and `every`. So the bar moves when it is to,
    the step is in the program only once, and no outputs of a remainder have to be put
    behind the others, which would copy them.

    Args:
        scan: Runs a loop: `(body, state, xs, loop) -> (state, ys)`.
        body: The step.
        state: What the first step gets. Its second entry is the carry.
        xs: What is scanned along the leading axis; nothing if the loop may be cut.
        loop: The loop, whose `meter` is that of the bar.
        after: What is to be there before the bar is shown.
        may_cut: Whether the loop may be cut into blocks.
    """
    gauge, cut = loop.meter.here, may_cut and loop.kept is None
    size = math.gcd(loop.length, gauge.every) if cut else 1

    def run(
        state: tuple[Value, Value, PyTree], xs: list[Value]
    ) -> tuple[PyTree, list[Value]]:
        number, position, state = state
        if size == 1:
            state, ys = body(state, xs)
            y = ys
        else:
            state, ys = scan(body, state, xs, loop.part(size))
            y = [y[0 if loop.reverse else -1] for y in ys]
        position = position + size
        number = gauge.report_if_due(number, position, size, state[1], y)
        return (number, position, state), ys

    state = (gauge.open(after), jnp.zeros((), jnp.int32), state)
    (number, _, state), ys = scan(run, state, xs, loop.in_blocks(size))
    return tied(number, (state, ys if size == 1 else list(map(_join, ys))))


def run_with_bar(
    gauge: Gauge,
    number: Index,
    state: PyTree,
    stop: Index,
    run: Callable[[PyTree, PyTree], PyTree],
    y_of: Callable[[PyTree], Arrays],
) -> tuple[PyTree, PyTree]:
    """Runs a loop whose length is not static, and its bar if it has one.

    Args:
        gauge: The bar.
        number: What the report before this one returned.
        state: The position, the carry, and so on.
        stop: The position to run to.
        run: From a state and a position to the state at that position.
        y_of: Finds the outputs of the last step.

    Returns:
        The number to hand on, and the state at the last position.
    """
    if not gauge.is_shown:
        return number, run(state, stop)

    def to_next_report(both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        number, state = both
        position = state[0]
        due = position + gauge.every - position % gauge.every
        state = run(state, jnp.minimum(due, stop))
        done, carry, y = state[0], state[1], y_of(state)
        number = gauge.report_if_due(number, done, done - position, carry, y)
        return number, tied(number, state)

    goes_on = lambda both: both[1][0] < stop
    return lax.while_loop(goes_on, to_next_report, (number, state))


def step_with_bar(
    gauge: Gauge, step: Callable[..., PyTree], length: int
) -> tuple[Callable[..., PyTree], list[Value]]:
    """A step that JAX differentiates, and that reports on the way back.

    Args:
        gauge: The bar of the backward sweep.
        step: `(consts, carry, x) -> (carry, y)`.
        length: How many steps there are.

    Returns:
        The step, with leaves behind its carry if there is a bar, and what these start
        with: the number, see `Gauge.watch`, and a counter.
    """
    if not gauge.is_shown:
        return step, []

    def run(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[PyTree, list[Value]]:
        *carry, number, position = carry
        number = gauge.watch(number, length - position, 1)
        carry, y = step(consts, carry, x)
        return [*carry, number, position + 1], y

    return run, [gauge.to_watch, jnp.zeros((), jnp.int32)]


def _join(y: PyTree) -> PyTree:
    return lax.reshape(y, (y.shape[0] * y.shape[1], *y.shape[2:]))
