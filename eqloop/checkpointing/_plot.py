"""Pictures of plans. Needs matplotlib, which is imported when something is drawn."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from .._calls import format_bytes
from .engine._costs import StepCost
from .engine._layout import Layout
from .engine.orders._order import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# With more events, the points could not be told apart.
_MOST_EVENTS = 20_000
_COLOURS = {"primal": "tab:green", "again": "tab:orange", "reversal": "tab:blue"}
_LABELS = {"primal": "primal", "again": "run again", "reversal": "reversed"}


def plot_plan(
    title: str, layout: Layout, cost: StepCost, peak_bytes: int, ax: "Axes | None"
) -> "Axes":
    """Draws the bytes in use during a gradient, and which step is run."""
    events = list(itertools.islice(layout.order.history(), _MOST_EVENTS + 1))
    if not 0 < len(events) <= _MOST_EVENTS:
        raise ValueError(
            f"Plan.plot: only gradients of 1 to {_MOST_EVENTS} evaluations of the step "
            f"can be drawn, but this one takes {layout.evaluations}. Draw the plan of "
            f"a shorter loop."
        )
    ax = axes_to_draw_on(ax)
    order, far = layout.order, list[int]()
    stored = [order.event_bytes(cost, event) for event in events]
    if layout.is_elsewhere:
        carries = lambda event: order.stored_by_primal(event) * cost.held
        far = [carries(event) + order.saved_bytes(cost, event) for event in events]
    if far and not layout.slots.take_device_memory:
        stored = [size - there for size, there in zip(stored, far, strict=True)]
    # The rest of the peak does not depend on the place in the sweep.
    rest = max(peak_bytes - max(stored), 0)
    sizes = [size + rest for size in stored]
    ax.fill_between(range(len(sizes)), sizes, step="post", color="0.85")
    ax.step(range(len(sizes)), sizes, where="post", color="0.5", linewidth=1)
    ax.set(xlabel="evaluations and reversals, in order", ylabel="bytes in use")
    highest = max(peak_bytes, *far, 0)
    if far:
        style: dict[str, Any] = dict(where="post", color="0.3", linestyle="--")
        ax.step(range(len(far)), far, linewidth=1, label=layout.slots.place, **style)
        ax.legend(loc="upper left", frameon=False)
    ax.set(xlim=(0, len(events)), ylim=(0, 1.05 * highest))
    # About five ticks, at multiples of a power of two.
    tick = 2 ** math.ceil(math.log2(max(highest, 1) / 6))
    ax.set_yticks(range(0, highest + 1, tick))
    ax.yaxis.set_major_formatter(format_axis)
    ax.set_title(title, fontsize="medium")
    _plot_positions(ax, events)
    return ax


def _plot_positions(ax: "Axes", events: list[Event]) -> None:
    """Draws which step is run, with an axis of its own on the right."""
    steps = ax.twinx()
    for kind, colour in _COLOURS.items():
        points = [(i, e.position) for i, e in enumerate(events) if e.kind == kind]
        if points:
            steps.plot(*zip(*points, strict=True), ".", ms=2, color=colour, label=kind)
    handles, kinds = steps.get_legend_handles_labels()
    steps.set_ylabel("step")
    steps.legend(
        handles,
        [_LABELS[kind] for kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncols=3,
        markerscale=4,
        frameon=False,
    )


# A plan in a picture: its peak memory in bytes, and its relative time.
Point: TypeAlias = tuple[int, float]


def plot_frontier(
    plans: Sequence[Point], chosen: Point | None, label: str, ax: "Axes | None"
) -> "Axes":
    """Draws time against memory, with the chosen plan marked, if there is one."""
    ax = axes_to_draw_on(ax)
    ax.plot(
        *zip(*plans, strict=True), ".-", linewidth=1, label="fastest within the memory"
    )
    if chosen is not None:
        ax.plot(*chosen, "*", ms=14, color="tab:red", label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(format_axis)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="peak memory", ylabel="time, storing everything = 1")
    ax.legend(frameon=False)
    return ax


def format_axis(value: float, _: object) -> str:
    """The bytes at a tick of an axis, as matplotlib asks for them."""
    return format_bytes(round(value))


def axes_to_draw_on(ax: "Axes | None") -> "Axes":
    """The axes that a user gave, or new ones."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError(
            "Plans are drawn with matplotlib, which is not installed. To install it: "
            "`python -m pip install matplotlib`"
        ) from None
    _, ax = pyplot.subplots(layout="constrained")
    return ax
