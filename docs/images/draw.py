"""Draws the pictures of `docs/guides/memory.md`: `python docs/images/draw.py`."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl

import eqloop as el

HERE = Path(__file__).parent


def cell(h, x):
    """A step that takes little beside its carry."""
    return jnp.tanh(h + x), None


def inputs(length):
    """The types of `init` and `xs`, which is all that a plan needs."""
    return (
        jax.ShapeDtypeStruct((64,), jnp.float32),
        jax.ShapeDtypeStruct((length, 64), jnp.float32),
    )


def save(ax, name):
    """Writes a picture beside this file."""
    figure = ax.figure
    figure.set_size_inches(6.4, 4.0)
    for each in figure.axes:
        for drawn in (*each.lines, *each.collections):
            drawn.set_rasterized(True)  # thousands of dots
    figure.savefig(HERE / f"{name}.svg", dpi=200, metadata={"Date": None})


def main():
    """Draws all pictures."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "eqloop"
    for name, schedule in {
        "binomial": el.Binomial(8),
        "recursive": el.Recursive(6, batch=1),
    }.items():
        save(el.Scan(cell, schedule=schedule).plan(*inputs(216)).plot(), name)
    scan = el.Scan(cell, schedule=el.Recursive(16, batch=1))
    save(scan.frontier(*inputs(4096)).plot(), "frontier")


if __name__ == "__main__":
    main()
