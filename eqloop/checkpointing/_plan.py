"""Plans: what a schedule decided for one loop, and what it will cost."""

import dataclasses
from typing import TYPE_CHECKING, Any

from .engine._forward import Active, Saveable
from .engine._layout import Layout, Nested, Revolved, Stored
from .engine._loop import Loop
from .engine._problem import Planner, Problem, all_active
from .engine._step import Step
from .planning._cost import StepCost, step_cost
from .planning._memory import peak_bytes
from .planning._time import duration
from .planning._units import format_bytes
from .planning._work import rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a schedule decided for one loop, and what a gradient will then cost.

    A scan's `plan` gives the very plan that it runs by. Printed, it is a table.

    Attributes:
        schedule: The schedule that decided.
        layout: Which carries are stored, and in which order the loop is reversed.
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
        Recursive(base=10)
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
        return self.layout.length

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """How many segments each nested level has: a tuple for each nest in turn."""
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
    def evaluations(self) -> int:
        """How often the step is evaluated for one gradient, by the primal included."""
        return self.layout.evaluations

    def __str__(self) -> str:
        rows = [("steps", str(self.length))]
        if self.levels:
            nests = (" x ".join(map(str, levels)) for levels in self.levels)
            rows.append(("levels", ", then ".join(nests)))
        if isinstance(self.layout, Stored):
            each = format_bytes(self.cost.everything // max(self.length, 1))
            rows.append(("stored", f"residuals, {each} a step"))
        else:
            each = format_bytes(self.cost.carry)
            rows.append(("stored carries", f"{self.slots}, {each} each"))
        if self.block > 1 and not isinstance(self.layout, Stored):
            each = format_bytes(self.cost.residuals)
            rows.append(("block", f"{self.block} steps, residuals of {each} each"))
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
        from .planning._plot import plot_plan

        return plot_plan(self, ax)


def plan(step: Step, loop: Loop, schedule: Any, policy: Saveable = None) -> Plan:
    """The plan that a loop runs by when all of its inputs are differentiated."""
    problem = Problem(step, loop, policy, schedule)
    active = all_active(step)
    return plan_of(problem, active, schedule.layout(problem, active))


def plan_of(
    problem: Problem, active: Active, layout: Layout, size: int | None = None
) -> Plan:
    """The plan that is made of a layout, and of what it takes if that is known."""
    cost, rate = step_cost(problem, active), rates()
    everything = duration(cost, Stored(layout.length), rate)
    return Plan(
        schedule=problem.planner,
        layout=layout,
        cost=cost,
        peak_bytes=peak_bytes(problem, active, layout) if size is None else size,
        relative_time=duration(cost, layout, rate) / everything if everything else 1.0,
    )
