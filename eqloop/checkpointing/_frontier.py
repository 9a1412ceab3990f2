"""The trade-off between memory and recomputation, of one loop under all schedules."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from .._calls import format_bytes
from ._budget import Budget
from ._plan import Plan, as_factor, plan, plan_of
from ._plot import plot_frontier
from ._run import planned
from ._schedules import AbstractSchedule, LoopPolicy
from .engine._problem import Placements
from .fused._choice import kernels
from .planning._alike import alike
from .planning._choice import pareto
from .planning._paces import paces
from .steps._loop import Loop
from .steps._step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# How many plans are compiled in the hope that no other one beats them. Without any,
# budgets found plans that were a fifth faster than the frontier's of the same memory,
# for a GRU of width 128 over 2000 steps; with 8, none that was 2 % faster.
_HOPEFUL = 8
# More rows than these are not read.
_SHOWN = 25


_P = TypeVar("_P")


@dataclasses.dataclass(frozen=True, repr=False)
class AbstractFrontier(Sequence[_P]):
    """Plans from the least memory to the least time, as a sequence."""

    plans: tuple[_P, ...]

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, index: int) -> _P: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[_P, ...]: ...
    def __getitem__(self, index: int | slice) -> _P | tuple[_P, ...]:
        """A plan, or some of them.

        Args:
            index: Its number, from the least memory on, or a slice.

        Returns:
            The plan, or a tuple of them.
        """
        return self.plans[index]


@dataclasses.dataclass(frozen=True, repr=False)
class Frontier(AbstractFrontier[Plan]):
    """The plans that no other plan beats both in memory and in time: a sequence.

    It goes from the least memory to the least time. Printed, it is a table of at most
    25 of them. The schedule of each plan is a [`Budget`][eqloop.Budget] of its memory;
    only the plan that the loop has now, if no other one beats it, has the loop's own.
    The memory is known for that one, for the first plan and for one of each kind, whose
    programs are compiled. For the others it is estimated from these, so their budget
    may choose a neighbouring plan.

    Attributes:
        plans: The plans.
        chosen: The plan of the schedule that the loop has now.
    """

    chosen: Plan

    def __repr__(self) -> str:
        return f"Frontier({len(self)} plans, chosen={self.chosen!r})"

    def __str__(self) -> str:
        head = ("memory", "time", "evaluations", "stored")
        shown = _shown(self.plans)
        rows = [head, *map(_row, shown), _row(self.chosen)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        lines[-1:] = [f"now, by {self.chosen.schedule!r}:", lines[-1]]
        if rest := len(self) - len(shown):
            lines.insert(-2, f"and {rest} between these: it is a sequence of all plans")
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws time against memory, with the chosen plan marked.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        at = lambda plan: (plan.peak_bytes, plan.relative_time)
        label = repr(self.chosen.schedule)
        return plot_frontier(list(map(at, self)), at(self.chosen), label, ax)


def frontier_of(
    step: Step,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: LoopPolicy = None,
    placed: Placements = (),
) -> Frontier:
    """The frontier of a loop, with the plan of its schedule."""
    if not loop.length:
        only = plan(step, loop, schedule, policy)
        return Frontier((only,), only)
    problem, active, layout = planned(step, loop, schedule, policy, placed)
    # As `Budget` does it: the plans are to be those that it would find.
    known = problem if problem.chooses_policy else alike(problem)
    before = paces(known, active, measure=True)
    found, times = pareto(known, active, before, _HOPEFUL)
    chosen = plan_of(schedule, problem, active, layout, times)
    plans = (
        plan_of(Budget(size), problem, active, layout, times, size)
        for layout, size in found
    )
    others = (
        plan_of(Budget(size), problem, active, kernel.layout, times, size)
        for kernel, size in kernels(known, active, measure=True)
    )
    return Frontier(_unbeaten((*plans, *others, chosen)), chosen)


def _shown(plans: Sequence[Plan]) -> list[Plan]:
    """Those to print: as far from each other, by factors of memory and time."""
    factor = lambda plan: max(plan.peak_bytes, 1) / plan.relative_time
    at = [math.log(factor(plan) / factor(plans[0])) for plan in plans]
    marks = (at[-1] * i / (_SHOWN - 1) for i in range(_SHOWN))
    near = {min(range(len(at)), key=lambda i: abs(at[i] - mark)) for mark in marks}
    every = range(len(plans)) if len(plans) <= _SHOWN else sorted(near)
    return [plans[i] for i in every]


def _row(plan: Plan) -> tuple[str, ...]:
    time = f"{as_factor(plan.relative_time)} x"
    return format_bytes(plan.peak_bytes), time, str(plan.evaluations), plan.columns[2]


def _unbeaten(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """The plans that no other one beats, by what they say themselves.

    More is known of a plan than of the layouts that were searched: what it depends on
    alone was measured for it, such as how long steps take together.
    """
    found: list[Plan] = []
    for one in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.relative_time)):
        if not found or one.relative_time < found[-1].relative_time:
            found.append(one)
    return tuple(found)
