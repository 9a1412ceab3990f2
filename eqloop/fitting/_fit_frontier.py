"""What a whole function takes, in memory and in time, in some of the ways to run it."""

import dataclasses
from typing import TYPE_CHECKING

from .._calls import format_bytes, format_limit
from ..checkpointing import AbstractFrontier, plot_frontier
from ._fit_plan import FitPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, repr=False)
class FitFrontier(AbstractFrontier[FitPlan]):
    """Plans of a function, from the least memory to the least time: a sequence.

    None of them takes more memory and more time than another. Printed, it is a table.

    Attributes:
        plans: The plans. Each has a `pinned` function.
        budget: The bytes that a gradient may take besides its inputs and outputs.
        chosen: The fastest of them within the budget, if one is: what `Fit.plan` gives.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(x):
        ...     x, _ = el.Scan(lambda x, _: (jnp.sin(x), None))(x, length=100)
        ...     return jnp.sum(x)
        >>> frontier = el.Fit(loss, "64KiB").frontier(jnp.ones(500))
        >>> print(frontier)
           memory    time
          ...
        >>> frontier.chosen.peak_bytes <= 64 * 1024
        True
    """

    budget: int
    chosen: FitPlan | None

    def __repr__(self) -> str:
        return f"FitFrontier({len(self)} plans, budget={self.budget})"

    def __str__(self) -> str:
        lines = [f"{'memory':>9}  {'time':>6}"]
        for plan in self.plans:
            size, time = format_bytes(plan.peak_bytes), f"{plan.relative_time:.2f} x"
            mark = "  the fastest within the budget" if plan is self.chosen else ""
            lines.append(f"{size:>9}  {time:>6}{mark}")
        lines.append("times are estimated, relative to storing everything")
        return "\n".join(lines)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draws time against memory, with the fastest plan within the budget marked.

        Args:
            ax: The axes to draw on; new ones by default.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        at = lambda plan: (plan.peak_bytes, plan.relative_time)
        chosen = None if self.chosen is None else at(self.chosen)
        label = f"within {format_limit(self.budget)}"
        return plot_frontier(list(map(at, self)), chosen, label, ax)
