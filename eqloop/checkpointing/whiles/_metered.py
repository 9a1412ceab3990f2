"""While loops with a progress bar: their steps are counted, and tell how many they are.

The number of the bar and the count are two more leaves of the carry. Where they are in
it, the meter knows.
"""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..._formula import Formula
from ..._partition import Arrays
from ...progress import Gauge, Meter, tied
from ..engine._loop import Loop
from ..engine._step import Step, make_step


class Tell(Formula):
    """`(number, count, carry) -> number`: has the bar move, should it be time.

    Attributes:
        gauge: The bar; `None` if the step is run again, and nothing is to be told.
    """

    gauge: Gauge | None

    def __init__(self, gauge: Gauge | None, args: Any):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = self.in_avals[0]
        self.params = dict(gauge=gauge)
        super().__init__()

    def expand(self, number: Any, count: Any, carry: Any) -> Any:
        if self.gauge is None:
            return number
        return self.gauge.report_if_due(number, count, 1, carry)

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        return self.zero_cts()

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [False]

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        # One bar for all examples: it counts the steps of the last to stop, and tells
        # of the first.
        at = lambda reduce: lambda x, dim: x if dim is None else reduce(x, dim)
        most, first = at(jnp.max), at(lambda x, dim: jnp.take(x, 0, dim))
        (number, count, carry), (*counts_dims, carry_dims) = args, dims
        number, count = map(most, (number, count), counts_dims)
        args = (number, count, list(map(first, carry, carry_dims)))
        return Tell(self.gauge, args)(*args), None

    def muted(self, backward: bool) -> Self:
        return self.with_params(gauge=None)


def counted(step: Step, loop: Loop) -> Step:
    """The step with the number of the bar and the count behind the first leaf."""

    def run(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[list[Any], list[Any]]:
        goes_on, number, count, *rest = carry
        (goes_on, *rest), _ = step(consts, [goes_on, *rest], x)
        args = (number, count + 1, rest)
        return [goes_on, Tell(loop.gauge, args)(*args), count + 1, *rest], []

    first, *rest = step.carry_types
    types = [first, *map(jax.typeof, start()), *rest]
    return make_step(run, step.const_types, types, [])


def start() -> list[Any]:
    """These two leaves, to start with."""
    return [jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)]


def opened(meter: Meter | None, consts: Arrays, init: Arrays) -> list[Any]:
    """The initial carry with the number of the bar, once it is shown."""
    if meter is None or meter.here is None:
        return list(init)
    init = list(init)
    number = meter.here.open([*consts, *init])
    init[meter.at] = jnp.broadcast_to(number, init[meter.at].shape)
    return init


def closed(meter: Meter | None, carry: Arrays, outputs: Any) -> Any:
    """The outputs of the loop that came to this carry, once the bar is at its end."""
    if meter is None or meter.here is None:
        return outputs
    number, count = (jnp.max(leaf) for leaf in carry[meter.at : meter.at + 2])
    number = meter.here.of(count).report(number, count, carry[meter.at + 2 :])
    return tied(number, outputs)
