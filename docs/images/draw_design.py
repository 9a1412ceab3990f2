"""Draws the picture of `docs/contributing.md`: `python docs/images/draw_design.py`."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

HERE = Path(__file__).parent
ROOMS = {"loops": "#e8f0fe", "checkpointing": "#fdeedc", "JAX": "#eeeeee"}

# Of every box: where its middle is, whose it is, and what it says.
BOXES = {
    "call": (1.4, 4.4, "loops", "scan(init, xs)\nPyTrees, axes, keys"),
    "step": (5.2, 4.4, "loops", "Step\n(consts, carry, x) → (carry, y)"),
    "problem": (9.2, 4.4, "checkpointing", "Problem\nstep, loop, policy, schedule"),
    "jax": (9.2, 3.2, "JAX", "vmap, jvp, vjp …"),
    "planning": (1.3, 2.0, "checkpointing", "planning\nbytes, time"),
    "schedule": (3.6, 2.0, "checkpointing", 'schedule\nBudget("1GiB")'),
    "layout": (6.1, 2.0, "checkpointing", "Layout\norder, slots, reversal"),
    "engine": (9.2, 2.0, "checkpointing", "engine\nforward and reverse sweep"),
    "close": (9.2, 0.8, "loops", "(carry, ys)\nPyTrees again"),
}
ARROWS = [
    ("call", "step"),
    ("step", "problem"),
    ("problem", "jax"),
    ("jax", "engine"),
    ("planning", "schedule"),
    ("schedule", "layout"),
    ("layout", "engine"),
    ("engine", "close"),
]


def draw(ax: Axes) -> None:
    """The way of a call: boxes, and arrows between them."""
    boxes = {}
    for name, (x, y, room, text) in BOXES.items():
        boxes[name] = ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.5", "facecolor": ROOMS[room]},
        )
    for start, end in ARROWS:
        ax.annotate(
            "",
            xy=BOXES[end][:2],
            xytext=BOXES[start][:2],
            arrowprops={
                "arrowstyle": "-|>",
                "color": "0.3",
                "patchA": boxes[start].get_bbox_patch(),
                "patchB": boxes[end].get_bbox_patch(),
            },
        )
    for x, (room, colour) in zip((0.6, 1.9, 3.4), ROOMS.items(), strict=True):
        box = {"boxstyle": "round,pad=0.3", "facecolor": colour}
        ax.text(x, 0.6, room, fontsize=9, ha="center", bbox=box)
    ax.set(xlim=(0, 10.8), ylim=(0.3, 4.9))
    ax.axis("off")


def main() -> None:
    """Draws the picture, the same bytes each time."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "eqloop"
    figure, ax = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    draw(ax)
    figure.savefig(HERE / "design.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
