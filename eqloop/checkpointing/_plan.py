"""Plans: what a schedule decided for one loop, and what it will cost."""

import dataclasses
from typing import Any

from ._cost import StepCost, step_cost
from ._engine import Policy
from ._layout import Layout, Nested, Revolved
from ._loop import Loop
from ._primitive import Planner, Problem, activity
from ._step import Step


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule decided for one loop, and what a gradient will then cost.

    Attributes:
        schedule: The schedule that decided.
        layout: Which carries are stored, and in which order the loop is reversed.
        cost: What a step costs.
    """

    schedule: Planner
    layout: Layout
    cost: StepCost = dataclasses.field(repr=False)

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        return self.layout.length

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """How many segments each nested level has; one tuple a nest, one after the other."""
        if not isinstance(self.layout, Nested):
            return ()
        return tuple(nest.levels for nest in self.layout.nests)

    @property
    def slots(self) -> int:
        """How many carries are stored at once, at the most."""
        if isinstance(self.layout, Revolved):
            return self.layout.primal_slots
        return self.layout.slots

    @property
    def block(self) -> int:
        """How many consecutive steps have their residuals stored together."""
        return self.layout.block

    @property
    def peak_bytes(self) -> int:
        """Bytes that a gradient allocates at once, besides its inputs and outputs."""
        return self.cost.peak_bytes(self.layout)

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient, by the primal included."""
        return self.layout.evaluations


def plan(step: Step, loop: Loop, schedule: Any, policy: Policy = None) -> Plan:
    """The plan that a loop runs by when all of its inputs are differentiated."""
    schedule.check(loop)
    problem = Problem(step, loop, policy, schedule)
    every = [
        [True] * len(types)
        for types in (step.const_types, step.carry_types, step.x_types)
    ]
    active, _ = activity(step, every)
    layout = schedule.layout(problem, active)
    return Plan(schedule, layout, step_cost(problem, active))
