"""Stores products in the primal, so that steps are run again without multiplying.

Most of the time of most steps goes into products of matrices. If the primal stores
their values, it takes little to run a step again: nothing is multiplied, and neither is
anything when the step is linearised (`_known_products.py`). Products are often smaller
than the residuals of a step. If there is not enough room for those of all steps, those
of the last steps are stored.

The loop carries them in buffers, with a counter. Slots do not hold these.

It gains: without, a few LSTMs of width 512 take 1.1 to 1.2 times as long on a CPU
within the same memory, and with the same plan on an H100 1.9 times the memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, split, stack_type, zero_array
from ..._programs import run
from ..._types import Aval, PyTree, Value
from ._forward import Active
from ._loop import store, zero
from ._problem import Problem, gradient_back
from ._step import Step, make_step
from .reversals._known_products import Products
from .reversals._together import can_join


@dataclasses.dataclass(frozen=True)
class Storing:
    """A loop whose primal stores the products of its last steps.

    Attributes:
        step: The step. Its carry is followed by a counter and by the buffers.
        products: The products.
        count: For how many steps they are stored.
    """

    step: Step
    products: Products
    count: int

    def started(self, inputs: PyTree) -> PyTree:
        """The inputs of the loop of `step`, from those of the original loop."""
        # The counter is the position of the step, which the step itself is not given.
        consts, init, xs = inputs
        rows = map(zero_array, _row_types(self.products, self.count))
        return consts, [*init, zero(), *rows], xs

    def stored(self, carry: Arrays) -> tuple[list[Value], list[Value]]:
        """The final carry of the original loop, and the rows of the products."""
        own, (_, *products) = split(carry, len(carry) - self.buffers)
        return list(own), products

    @property
    def buffers(self) -> int:
        """How many leaves follow those of the original carry."""
        return 1 + len(self.products.types)


def products_to_store(
    problem: Problem, active: Active, wanted: Flags
) -> Products | None:
    """The products of a step that the primal can store, if there are any.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        wanted: Which leaves of `y` may have a cotangent.
    """
    step = problem.step
    # If a loop may stop early, it is not known which of its steps are the last ones.
    if problem.as_run.loop.stops or step.inverse is not None or not can_join(step):
        return None
    return gradient_back(problem, active, wanted).products


@functools.lru_cache(maxsize=128)
def storing_products(
    step: Step, products: Products, length: int, count: int
) -> Storing:
    """A step that also stores its products.

    Args:
        step: The step.
        products: Its products.
        length: How many steps the loop has.
        count: For how many of the last steps the products are stored.
    """

    def move(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        carry, (position, *rows) = split(carry, step.num_carry)
        after, y = step(consts, carry, x)
        # The step computes these products as well, and XLA merges the two. If this loop
        # is differentiated once more, the buffers have no derivative.
        inputs = lax.stop_gradient([*consts, *carry, *x])
        values = run(products.program, *inputs)
        # Earlier steps all write to the first row, which the first of the last steps
        # then writes again. A branch around the write would copy the buffers.
        row = jnp.maximum(position - (length - count), 0)
        rows = [store(r, value, row) for r, value in zip(rows, values, strict=True)]
        return [*after, position + 1, *rows], y

    more = jax.typeof(zero()), *_row_types(products, count)
    carry = [*step.carry_types, *more]
    grown = make_step(move, step.const_types, carry, step.x_types)
    return Storing(grown, products, count)


def _row_types(products: Products, count: int) -> list[Aval]:
    """The types of the buffers for the products of so many steps."""
    return [stack_type(aval, count) for aval in products.types]
