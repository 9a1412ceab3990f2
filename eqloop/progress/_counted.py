"""Bars of while loops: the steps are counted, and each reports the count.

The number of the bar and the count are two more leaves of the carry. Where they are in
it, the meter knows.
"""

from collections.abc import Callable, Sequence
from typing import Self

import jax
import jax.numpy as jnp

from .._arrays import Arrays, put_on_mesh
from .._programs import Formula
from .._types import BatchAxis, Index, PyTree, Value
from ._changes import BarChange
from ._meter import Meter, tied


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

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
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
    """Runs a loop of such a step, and its bar if it has one.

    Args:
        run: From the initial carry to the last one, and what else there is.
        meter: The bars of the loop.
        consts: What the steps get each time.
        init: The initial carry.
    """
    gauge, at = meter.here, meter.at
    if not gauge.is_shown:
        return run(init)
    number = gauge.open([*consts, *init])
    numbers = jnp.broadcast_to(number, init[at].shape)
    outputs = run([*init[:at], numbers, *init[at + 1 :]])
    number, count = map(jnp.max, outputs[0][at : at + 2])
    number = gauge.of(count).report(number, count, outputs[0][at + 2 :])
    return tied(number, outputs)
