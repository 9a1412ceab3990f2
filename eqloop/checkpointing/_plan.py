"""Plans: what a schedule decided for one loop, and what it will cost."""

import dataclasses
from typing import TYPE_CHECKING, Any

from .._bytes import format_bytes
from .engine._all_at_once import AllAtOnce
from .engine._costs import StepCost
from .engine._forward import Active, Saveable
from .engine._layout import Layout
from .engine._loop import Loop
from .engine._problem import Planner, Problem, all_active
from .engine._repetition import Counted
from .engine._step import Step
from .planning._cost import step_cost
from .planning._memory import peak_bytes
from .planning._work import rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule decided for one loop, and what a gradient will then cost.

    A scan's `plan` gives the very plan that it runs by. Printed, it is a table.

    Attributes:
        schedule: The schedule that decided.
        layout: The order, the slots and the reversal that it chose.
        cost: What a step costs.
        peak_bytes: Bytes that a gradient allocates at once, besides its inputs and
            outputs. It is meant to be no less than what XLA reports as temporary
            memory, and seldom more by a few per cent.
        relative_time: How long a gradient takes, where storing every residual takes 1.
            It is estimated, from the work of a step, for the backend in use, and is for
            comparing plans: light steps can take several times as long.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.CheckpointedScan(lambda h, x: (jnp.sin(h) + x, None), base=10)
        >>> plan = scan.plan(jnp.zeros(100), jnp.zeros((1000, 100)))
        >>> print(plan)
        Recursive(base=10, block=1)
          steps              1000
          levels             10 x 10 x 10
          stored carries     30, 400 B each
          evaluations        3800, 3.80 a step
          peak memory        ... KiB
          time               ... x storing everything
    """

    schedule: Planner
    layout: Layout = dataclasses.field(repr=False)
    cost: StepCost = dataclasses.field(repr=False)
    peak_bytes: int
    relative_time: float

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        return self.layout.order.length

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """How many segments each nested level has: a tuple for each nest in turn."""
        return self.layout.order.levels

    @property
    def slots(self) -> int:
        """How many carries are stored at once, at the most."""
        return self.layout.order.slots

    @property
    def block(self) -> int:
        """How many consecutive steps have their residuals stored together."""
        return self.layout.order.block

    @property
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient, by the primal included."""
        return self.layout.order.evaluations

    def __str__(self) -> str:
        rows = [("steps", str(self.length))]
        if self.levels:
            nests = (" x ".join(map(str, levels)) for levels in self.levels)
            rows.append(("levels", ", then ".join(nests)))
        rows += self.layout.order.described(self.cost)
        per_step = self.evaluations / max(self.length, 1)
        rows += [
            ("evaluations", f"{self.evaluations}, {per_step:.2f} a step"),
            ("peak memory", format_bytes(self.peak_bytes)),
            ("time", f"{self.relative_time:.2f} x storing everything"),
        ]
        return "\n".join(
            [repr(self.schedule), *(f"  {name:<19}{value}" for name, value in rows)]
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws the bytes that are live over the sweep, and what is run when.

        Above, the carries and residuals that are stored as the gradient proceeds;
        below, which step is run: by the primal, again, or backwards.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from ._plot import plot_plan

        return plot_plan(self, ax)


def plan(step: Step, loop: Loop, schedule: Any, policy: Saveable = None) -> Plan:
    """The plan that a loop runs by when all of its inputs are differentiated."""
    # That of a loop which may stop is made for all of its steps.
    all_of_it = dataclasses.replace(loop, stops=False)
    problem = Problem(step, all_of_it, policy, schedule, Counted())
    active = all_active(step)
    layout = problem.layout(active)
    return plan_of(problem, active, layout.by_carries() if loop.stops else layout)


def plan_of(
    problem: Problem, active: Active, layout: Layout, size: int | None = None
) -> Plan:
    """The plan that is made of a layout, and of what it takes if that is known."""
    cost, rate = step_cost(problem, active), rates()
    everything = Layout(AllAtOnce(layout.order.length)).duration(cost, rate)
    return Plan(
        schedule=problem.planner,
        layout=layout,
        cost=cost,
        peak_bytes=peak_bytes(problem, active, layout) if size is None else size,
        relative_time=layout.duration(cost, rate) / everything if everything else 1.0,
    )
