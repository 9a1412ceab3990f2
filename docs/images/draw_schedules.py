"""Draws the pictures of `docs/how_it_works.md`: `python docs/images/draw_schedules.py`.

Time runs to the right, the steps of the loop upwards. The plans are real ones, and what
they do is what the engine does: nothing here decides where a carry is stored.
"""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

import eqloop as el
from eqloop.checkpointing import AbstractSchedule
from eqloop.checkpointing.engine.orders._order import Event
from eqloop.checkpointing.whiles._online import Online
from eqloop.checkpointing.whiles._spread import full, move_on

HERE = Path(__file__).parent
LENGTH = 36
SCHEDULES = {
    "store_all": el.StoreAll(),
    "chunked": el.Chunked(6),
    "nested": el.Recursive(3),
    "revolve": el.Binomial(4),
}
STORED = {"color": "0.7", "linewidth": 1.2, "zorder": 1}
KINDS = {
    "primal": ("tab:green", "primal"),
    "again": ("tab:orange", "run again"),
    "reversal": ("tab:blue", "reversed"),
}

# From when to when something of a step is stored: (step, first, last).
Span = tuple[float, int, int]


def plan_of(schedule: AbstractSchedule) -> el.Plan:
    """The plan of a loop whose step is no matter here."""
    scan = el.Scan(lambda h, x: (jnp.tanh(h + x), None), schedule=schedule)
    return scan.plan(jnp.zeros(8), jnp.zeros((LENGTH, 8)))


def carries(events: list[Event]) -> Iterator[Span]:
    """When each slot holds which carry. Slots are a stack, lowest step first."""
    stack: list[tuple[int, int]] = []
    for time, event in enumerate(events):
        while stack and (len(stack) > event.slots or stack[-1][0] > event.position):
            position, since = stack.pop()
            yield position, since, time
        while len(stack) < event.slots:
            stack.append((event.position, time))
    yield from ((position, since, len(events)) for position, since in stack)


def residuals(events: list[Event]) -> Iterator[Span]:
    """When the residuals of each step are stored, if they are by the primal."""
    since = {event.position: i for i, event in enumerate(events) if i < LENGTH}
    for time, event in enumerate(events[LENGTH:], LENGTH + 1):
        yield event.position + 0.5, since[event.position] + 1, time


def draw_plan(ax: Axes, plan: el.Plan, width: int) -> None:
    """The space-time diagram of one plan."""
    events = list(plan._layout.order.history())
    spans = carries(events) if plan.slots else residuals(events)
    lines = [[(first, at), (last, at)] for at, first, last in spans]
    ax.add_collection(LineCollection(lines, label="stored", **STORED))
    for kind, (colour, label) in KINDS.items():
        # A step takes the carry one up, its reversal takes the cotangent one down.
        here, there = (1, 0) if kind == "reversal" else (0, 1)
        step = [
            [(time, event.position + here), (time + 1, event.position + there)]
            for time, event in enumerate(events)
            if event.kind == kind
        ]
        ax.add_collection(
            LineCollection(step, color=colour, linewidth=2, label=label, zorder=2)
        )
    ax.set(xlim=(-1, width + 1), ylim=(-1, LENGTH + 1), yticks=range(0, LENGTH + 1, 12))
    ax.set(xlabel="evaluations and reversals, in order", ylabel="step")
    kept = f"{plan.slots} carries" if plan.slots else "all residuals"
    ax.set_title(
        f"{plan.schedule!r}: {kept}, {plan.evaluations} evaluations",
        fontsize="medium",
        loc="left",
    )


def draw_online(ax: Axes, slots: int, length: int) -> None:
    """Which carries a loop of unknown length has stored, as it goes on."""
    order = Online(length, slots)
    shown = [(t, [float(s) for s in range(t + 1)]) for t in range(slots)]
    spread, position = full(order), slots
    while position < length:
        _, spread = move_on(order, spread, jnp.asarray(position, jnp.int32))
        shown.append((position, [float(start) for start in spread.starts]))
        position = min(int(spread.stop), length)
    lines = []
    ends = [time for time, _ in shown[1:]] + [length]
    for (time, starts), end in zip(shown, ends, strict=True):
        lines += [[(time, start), (end, start)] for start in starts]
    ax.add_collection(LineCollection(lines, **STORED))
    ax.plot([0, length], [0, length], color="tab:green", linewidth=2)
    ax.axvline(slots * (slots + 3) / 2, color="0.4", linestyle=":", linewidth=1)
    ax.set(xlim=(-1, length + 1), ylim=(-1, length + 1))
    ax.set(xlabel="steps that have been run", ylabel="step")
    ax.set_title(f"{slots} slots", fontsize="medium", loc="left")


def save(figure: Figure, name: str) -> None:
    """Writes a picture beside this file, the same bytes each time."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Draws all pictures."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "eqloop"
    plans = {name: plan_of(schedule) for name, schedule in SCHEDULES.items()}
    width = max(len(list(plan._layout.order.history())) for plan in plans.values())
    for name, plan in plans.items():
        figure, ax = pyplot.subplots(figsize=(7.2, 2.6), layout="constrained")
        draw_plan(ax, plan, width)
        figure.legend(loc="outside right center", frameon=False)
        save(figure, f"schedule_{name}")
    figure, ax = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
    draw_online(ax, slots=6, length=60)
    save(figure, "schedule_online")


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):
        main()
