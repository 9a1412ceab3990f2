"""Loops that report how far they have come, so that their bars move.

Whoever runs a loop passes its body, or its way back, to one of these functions. They
run it with reports in it, or as it is if there is no bar. The number of the bar is one
more entry of what the loop carries. What the loop is decides where the reports are:

- a scan of a length that is static: between blocks of steps (`scan_with_bar`),
- steps up to a position that is not: where the bar moves next (`run_with_bar`),
- steps that JAX differentiates: in a rule of the way back (`step_with_bar`),
- a while loop: in each step, which counts them (`counted`, `while_with_bar`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import Arrays, put_on_mesh
from .._programs import Formula
from .._types import BatchAxis, Index, PyTree, Value
from ._meter import BarChange, Gauge, Meter, tied


def scan_with_bar(
    scan: Callable[..., tuple[PyTree, list[Value]]],
    body: Callable[..., tuple[PyTree, list[Value]]],
    state: PyTree,
    xs: Arrays,
    loop: Any,
    after: Arrays,
    may_cut: bool,
) -> tuple[PyTree, list[Value]]:
    """Runs a scan, and its bar."""
    # Nothing is asked at each step if it can be helped: the loop is run in blocks of as
    # many steps as divide both its length and `every`. So the bar moves when it is to,
    # the step is in the program only once, and no outputs of a remainder have to be put
    # behind the others, which would copy them.
    # The second entry of the state is the carry, and `after` is what is to be there
    # before the bar is shown.
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
    if size > 1:  # the blocks one behind the other
        ys = [lax.reshape(y, (y.shape[0] * size, *y.shape[2:])) for y in ys]
    return tied(number, (state, ys))


def run_with_bar(
    gauge: Gauge,
    number: Index,
    state: PyTree,
    stop: Index,
    run: Callable[[PyTree, PyTree], PyTree],
    y_of: Callable[[PyTree], Arrays],
) -> tuple[PyTree, PyTree]:
    """Runs a loop whose length is not static, and its bar if it has one."""
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
    """A step that JAX differentiates, and that reports on the way back."""
    # Also returned is what the leaves behind the carry start with: the number, see
    # `Gauge.watch`, and a counter.
    if not gauge.is_shown:
        return step, []

    def run(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[PyTree, list[Value]]:
        *carry, number, position = carry
        number = gauge.watch(number, length - position, 1)
        carry, y = step(consts, carry, x)
        return [*carry, number, position + 1], y

    return run, [gauge.to_watch, jnp.zeros((), jnp.int32)]


# While loops. The number of the bar and the count are two more leaves of the carry.
# Where they are in it, the meter knows.


class CountReport(Formula):
    """`(number, count, carry) -> number`: has the bar move, should it be time."""

    meter: Meter

    def __init__(self, meter: Meter, args: PyTree):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = self.in_avals[0]
        self.params = dict(meter=meter)
        super().__init__()

    def expand(self, number: Index, count: Index, carry: PyTree) -> PyTree:
        return self.meter.here.report_if_due(number, count, 1, carry)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.zero_cts()

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return [False]

    def batch(self, axis_data: BatchAxis, args: PyTree, dims: PyTree) -> PyTree:
        # One bar for all examples: it counts the steps of the last to stop, and is
        # labelled with the carry of the first.
        at = lambda reduce: lambda x, dim: x if dim is None else reduce(x, dim)
        most, first = at(jnp.max), at(lambda x, dim: jnp.take(x, 0, dim))
        (number, count, carry), (*counts_dims, carry_dims) = args, dims
        number, count = map(most, (number, count), counts_dims)
        args = (number, count, list(map(first, carry, carry_dims)))
        return CountReport(self.meter, args)(*args), None

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(meter=change.meter(self.meter))


def counted(meter: Meter, step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The step with the number of the bar and the count behind the first leaf."""

    def run(
        consts: Arrays, carry: Arrays, x: Arrays
    ) -> tuple[list[Value], list[Value]]:
        goes_on, number, count, *rest = carry
        (goes_on, *rest), y = step(consts, [goes_on, *rest], x)
        args = (number, count + 1, rest)
        return [goes_on, CountReport(meter, args)(*args), count + 1, *rest], y

    return run


def with_count(init: Arrays) -> list[Value]:
    """The initial carry of that step."""
    zero = put_on_mesh(jnp.zeros((), jnp.int32))
    return [init[0], zero, zero, *init[1:]]


def while_with_bar(
    run: Callable[[Arrays], tuple[PyTree, PyTree]],
    meter: Meter,
    consts: Arrays,
    init: Arrays,
) -> tuple[PyTree, PyTree]:
    """Runs a loop of such a step, and its bar if it has one."""
    gauge, at = meter.here, meter.at
    if not gauge.is_shown:
        return run(init)
    number = gauge.open([*consts, *init])
    numbers = jnp.broadcast_to(number, init[at].shape)
    outputs = run([*init[:at], numbers, *init[at + 1 :]])
    number, count = map(jnp.max, outputs[0][at : at + 2])
    number = gauge.of(count).report(number, count, outputs[0][at + 2 :])
    return tied(number, outputs)
