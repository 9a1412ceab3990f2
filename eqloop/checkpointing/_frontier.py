"""The trade-off between memory and recomputation, of one loop under all schedules."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from ._budget import Budget
from ._plan import Plan, plan, plan_of
from ._schedule import AbstractSchedule
from .engine._forward import Saveable
from .engine._loop import Loop
from .engine._problem import Problem, all_active
from .engine._repetition import Counted
from .engine._step import Step
from .planning._choice import pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, repr=False)
class Frontier(Sequence[Plan]):
    """The plans that no other plan beats both in memory and in time: a sequence.

    It goes from the least memory to the least time. The schedule of each plan is the
    [`Budget`][eqloop.Budget] for what it takes. That is known for the first plan and
    for one of every kind, whose programs are compiled; for the others it is told from
    these, and the budget may come to choose a plan beside.

    Attributes:
        plans: The plans.
        chosen: The plan of the schedule that the loop has now.
    """

    plans: tuple[Plan, ...]
    chosen: Plan

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, index: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[index]

    def __repr__(self) -> str:
        return f"Frontier({len(self)} plans, chosen={self.chosen!r})"

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws time against memory, with the chosen plan marked.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from ._plot import plot_frontier

        return plot_frontier(self, ax)


def frontier_of(
    step: Step, loop: Loop, schedule: AbstractSchedule, policy: Saveable = None
) -> Frontier:
    """The frontier of a loop, with the plan of its schedule."""
    chosen = plan(step, loop, schedule, policy)
    if not loop.length:
        return Frontier((chosen,), chosen)
    active = all_active(step)

    all_of_it = dataclasses.replace(loop, stops=False)
    problem = Problem(step, all_of_it, policy, schedule, Counted())
    plans = (
        dataclasses.replace(
            plan_of(problem, active, layout, size), schedule=Budget(size)
        )
        for layout, size in pareto(problem, active)
        if not (loop.stops and layout.stores_residuals)
    )
    return Frontier(tuple(plans), chosen)
