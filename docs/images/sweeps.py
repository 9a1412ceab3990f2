"""Draws a picture of `docs/how_it_works.md`: `python docs/images/sweeps.py`.

It shows the bytes in use over the sweep of one gradient, as the plans tell them.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib import pyplot

import eqloop as el

STEPS, WIDTH = 256, 64
SCHEDULES = {
    "StoreAll()": (el.StoreAll(), "tab:red"),
    "Recursive(16)": (el.Recursive(16, batch=1), "tab:blue"),
    "Binomial(8)": (el.Binomial(8), "tab:green"),
}


def sweep(schedule):
    """The KiB in use at each evaluation and each reversal, in their order."""
    cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(0))
    scan = el.Scan(lambda h, x: (cell(x, h), None), schedule=schedule)
    h = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    xs = jax.ShapeDtypeStruct((STEPS, WIDTH), jnp.float32)
    _, axes = pyplot.subplots()
    (line,) = scan.plan(h, xs).plot(axes).lines
    order, nbytes = line.get_data()
    return order, [each / 1024 for each in nbytes]


def draw(axes, top):
    """All sweeps, up to so many KiB."""
    for name, (schedule, colour) in SCHEDULES.items():
        order, kib = sweep(schedule)
        # Thousands of corners, which take less as an image within the drawing.
        style = dict(color=colour, rasterized=True)
        axes.fill_between(order, kib, step="post", alpha=0.12, lw=0, **style)
        axes.step(order, kib, where="post", linewidth=1.6, label=name, **style)
    axes.set(xlim=(0, None), ylim=(0, top), ylabel="KiB in use")
    axes.spines[["top", "right"]].set_visible(False)


def main():
    """Draws the sweeps twice: whole, and closer to the axis."""
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "eqloop", "font.size": 14})
    figure, (whole, close) = pyplot.subplots(
        2, 1, sharex=True, figsize=(6.4, 6.4), layout="constrained"
    )
    draw(whole, 640)
    draw(close, 14)
    whole.set_title("The memory of one gradient, as it is computed", fontsize=14)
    whole.legend(frameon=False, loc="upper right")
    close.set_title("The same, 45 times closer", fontsize=14)
    close.set(xlabel="steps that were run or reversed", yticks=range(0, 14, 4))
    figure.savefig(Path(__file__).with_suffix(".svg"), dpi=200, metadata={"Date": None})


if __name__ == "__main__":
    main()
