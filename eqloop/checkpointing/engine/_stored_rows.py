"""Stores more than carries of the last steps: their residuals.

The last steps are taken back first, and then the room of what is stored of them is free
for the others. With the residuals of a step, nothing of it is run again
(`_step_parts.py`). The step returns them as the first of its outputs, and the loop
keeps rows of these for its last steps alone (`Loop.stored`).
"""

import dataclasses
import functools

from jax import lax

from ..._arrays import Arrays, Flags, split
from ..._types import Value
from ._backward_step import Pull
from ._forward import Active
from ._problem import Problem, gradient_back
from ._step import Step, make_step
from ._step_parts import StepParts, step_with_residuals
from ._sweep import KnownResiduals
from .slots._slots import DeviceSlots

# Residuals are stored in the form of slots on the device.
_SLOTS = DeviceSlots()


@dataclasses.dataclass(frozen=True)
class StoredResiduals:
    """The residuals of the last steps, which the primal stores.

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
        """How many arrays that is."""
        return len(self.parts.kept_types)

    def stored_by(self, problem: Problem, count: int) -> Problem:
        """The loop that stores them, of so many of its last steps."""
        # If the loop is itself the forward sweep of a gradient, it has some already, of
        # as many steps.
        leaves = self.leaves + problem.loop.stored[1]
        loop = dataclasses.replace(problem.loop, stored=(count, leaves))
        step = _returning_residuals(self.back)
        return dataclasses.replace(problem, step=step, loop=loop)

    def known(self, rows: Arrays, first: int, consts: Arrays) -> KnownResiduals:
        """The residuals that the primal has stored.

        Args:
            rows: Their rows.
            first: The position of the first of these steps.
            consts: The consts of the step.
        """
        fixed = self.parts.fixed(consts)
        return KnownResiduals(rows, first, self.back, self.parts, _SLOTS, fixed)


def residuals_to_store(
    problem: Problem, active: Active, wanted: Flags
) -> StoredResiduals:
    """The residuals of a step, for a loop that is known not to stop early."""
    back = gradient_back(problem, active, wanted)
    # With the bars of loops in the step: it is not run again.
    step = problem.reversed_step(problem.step)
    return StoredResiduals(dataclasses.replace(back, step=step))


@functools.lru_cache(maxsize=128)
def _returning_residuals(back: Pull) -> Step:
    step, parts = step_with_residuals(back)

    def move(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        after, y = step(consts, carry, x)
        kept, y = split(y, len(parts.kept_types))
        return after, [*_SLOTS.packed(lax.stop_gradient(kept)), *y]

    made = make_step(move, step.const_types, step.carry_types, step.x_types)
    return dataclasses.replace(made, inverse=step.inverse, saved=step.saved)
