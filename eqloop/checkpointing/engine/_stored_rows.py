"""Stores more than carries of the last steps: their residuals, or their products.

The last steps are taken back first, and then the room of what is stored of them is free
for the others. The step returns it as the first of its outputs, and the loop keeps rows
of these for its last steps alone (`Loop.stored`).

- With the residuals of a step, nothing of it is run again (`_step_parts.py`).
- Most of the time of most steps goes into products of matrices. With their values, it
  takes little to run a step again: nothing is multiplied, and neither is anything when
  the step is linearised (`reversals/_known_products.py`). Products are often smaller
  than the residuals of a step.

Products gain: without, a few LSTMs of width 512 take 1.1 to 1.2 times as long on a CPU
within the same memory, and with the same plan on an H100 1.9 times the memory.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable

from jax import lax

from ..._arrays import Arrays, Flags, split
from ..._programs import run
from ..._types import Value
from ._backward_step import Pull
from ._forward import Active
from ._problem import Problem, gradient_back
from ._step import Step, make_step
from ._step_parts import StepParts, step_with_residuals
from ._sweep import KnownResiduals
from .reversals._known_products import Products
from .reversals._together import can_join
from .slots._slots import DeviceSlots

# Residuals are stored in the form of slots on the device.
_SLOTS = DeviceSlots()


class StoredOfSteps(abc.ABC):
    """What the primal stores of each of the last steps: a frozen dataclass."""

    @property
    @abc.abstractmethod
    def leaves(self) -> int:
        """How many arrays that is."""

    @abc.abstractmethod
    def returned_by(self, step: Step) -> Step:
        """The step that returns them before its `y`."""

    def stored_by(self, problem: Problem, count: int) -> Problem:
        """The loop that stores them, of so many of its last steps."""
        # If the loop is itself the forward sweep of a gradient, it has some already, of
        # as many steps.
        leaves = self.leaves + problem.loop.stored[1]
        loop = dataclasses.replace(problem.loop, stored=(count, leaves))
        step = self.returned_by(problem.step)
        return dataclasses.replace(problem, step=step, loop=loop)


@dataclasses.dataclass(frozen=True)
class StoredProducts(StoredOfSteps):
    """The products of the steps."""

    products: Products

    @property
    def leaves(self) -> int:
        return len(self.products.types)

    def returned_by(self, step: Step) -> Step:
        return _returning_products(step, self.products)


@dataclasses.dataclass(frozen=True)
class StoredResiduals(StoredOfSteps):
    """The residuals of the steps.

    Attributes:
        back: The backward step whose residuals they are.
    """

    back: Pull

    @property
    def parts(self) -> StepParts:
        """The backward step in two programs."""
        return step_with_residuals(self.back)[1]

    @property
    def leaves(self) -> int:
        return len(self.parts.kept_types)

    def returned_by(self, step: Step) -> Step:
        return _returning_residuals(self.back)

    def known(self, rows: Arrays, first: int, consts: Arrays) -> KnownResiduals:
        """The residuals that the primal has stored.

        Args:
            rows: Their rows.
            first: The position of the first of these steps.
            consts: The consts of the step.
        """
        fixed = self.parts.fixed(consts)
        return KnownResiduals(rows, first, self.back, self.parts, _SLOTS, fixed)


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


def residuals_to_store(
    problem: Problem, active: Active, wanted: Flags
) -> StoredResiduals:
    """The residuals of a step, for a loop that is known not to stop early."""
    back = gradient_back(problem, active, wanted)
    # With the bars of loops in the step: it is not run again.
    step = problem.reversed_step(problem.step)
    return StoredResiduals(dataclasses.replace(back, step=step))


@functools.lru_cache(maxsize=128)
def _returning_products(step: Step, products: Products) -> Step:
    def move(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        after, y = step(consts, carry, x)
        # The step computes these products as well, and XLA merges the two. If this loop
        # is differentiated once more, what is stored has no derivative.
        inputs = lax.stop_gradient([*consts, *carry, *x])
        return after, [*run(products.program, *inputs), *y]

    return _like(step, move)


@functools.lru_cache(maxsize=128)
def _returning_residuals(back: Pull) -> Step:
    step, parts = step_with_residuals(back)

    def move(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        after, y = step(consts, carry, x)
        kept, y = split(y, len(parts.kept_types))
        return after, [*_SLOTS.packed(lax.stop_gradient(kept)), *y]

    return _like(step, move)


def _like(step: Step, move: Callable[..., tuple[list[Value], list[Value]]]) -> Step:
    """A step that has other outputs, and the inverse of another one."""
    made = make_step(move, step.const_types, step.carry_types, step.x_types)
    return dataclasses.replace(made, inverse=step.inverse, saved=step.saved)
