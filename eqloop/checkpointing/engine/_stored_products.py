"""Loops whose primal stores the products of each step, to be run again without them.

What takes time in most steps are products of matrices. If the primal stores them, then
to run a step again takes little: it multiplies nothing, and neither does linearising it
(`_known_products.py`). They are often smaller than the residuals of a step, and no
smaller than its carry.
"""

import dataclasses
import functools

from ..._partition import Flags
from ..._programs import run
from ..._types import Value
from ._forward import Active
from ._problem import Problem, gradient_back
from ._step import make_step
from .reversals._together import can_join


@dataclasses.dataclass(frozen=True)
class StoredProducts:
    """A loop that stores its products, as two loops.

    Attributes:
        primal: It also gives the products of each step: the last leaves of its `y`.
        rerun: It takes them: the last leaves of its `x`.
        count: How many there are.
    """

    primal: Problem
    rerun: Problem
    count: int

    def active(self, active: Active) -> Active:
        """Which inputs of the loop that takes them are differentiated."""
        return active._replace(xs=(*active.xs, *[False] * self.count))


@functools.lru_cache(maxsize=128)
def with_stored_products(
    problem: Problem, active: Active, wanted: Flags
) -> StoredProducts | None:
    """The two loops, if the steps have products, and it saves anything to store them.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        wanted: Which leaves of `y` may have a cotangent.
    """
    step, loop = problem.step, problem.loop
    # Rows that are left out would be products that are left out.
    if loop.kept is not None or step.inverse is not None or not can_join(step):
        return None
    found = gradient_back(problem, active, wanted).with_products()
    if found is None:
        return None
    program, given = found
    count = len(program.out_avals)

    def move(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        after, y = step(consts, carry, x)
        # The step computes these, too. XLA does so once.
        return after, [*y, *run(program, *consts, *carry, *x)]

    giving = make_step(move, step.const_types, step.carry_types, step.x_types)
    behind = dataclasses.replace(loop, x_axes=(*loop.x_axes, *[0] * count))
    return StoredProducts(
        primal=dataclasses.replace(problem, step=giving),
        rerun=dataclasses.replace(problem, step=given.base.step, loop=behind),
        count=count,
    )
