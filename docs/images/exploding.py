"""Draws the picture of a recipe: `python docs/images/exploding.py`.

It shows the norm of the cotangent of the carry at every step of the backward pass. The
recipe is *Where does my gradient explode?*, which has this cell and these inputs.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib import pyplot

import eqloop as el

STEPS, WIDTH = 200, 32
WEIGHT = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH**0.5
XS = 0.1 * jax.random.normal(jax.random.key(1), (STEPS, WIDTH))
H0 = jnp.ones(WIDTH) / WIDTH**0.5


def recurrent(scale):
    """A plain recurrent cell, whose weights have this scale."""
    return lambda h, x: (jnp.tanh(scale * WEIGHT @ h + x), None)


def resets(h, x):
    """A cell that divides by the norm of its state, which an input brings near 0."""
    turned = jnp.roll(h, 1)
    is_reset = jnp.all(x == 0)
    new = turned - jnp.where(is_reset, 0.9999 * jax.lax.stop_gradient(turned), 0)
    return new / jnp.linalg.norm(new), None


def norms(cell, max_norm=math.inf, xs=XS):
    """The norm at each step, in the order of the steps."""
    scan = el.CheckpointedScan(cell, backward=el.ClipCotangent(max_norm, log=True))
    target = jnp.sin(jnp.arange(WIDTH))
    loss = lambda log: jnp.sum(target * scan(H0, xs, log=log)[0])
    return jax.grad(loss)(scan.empty_log(H0, xs))


def main():
    """Draws the norms."""
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "eqloop", "font.size": 14})
    figure, axes = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
    curves = {
        "weights too large": (norms(recurrent(2.5)), "tab:blue"),
        "the same, clipped": (norms(recurrent(2.5), 10.0), "tab:green"),
        "weights too small": (norms(recurrent(0.9)), "tab:gray"),
        "one bad step": (norms(resets, xs=XS.at[120].set(0)), "tab:red"),
    }
    for label, (curve, color) in curves.items():
        axes.semilogy(curve, color=color, label=label, linewidth=1.6)
    # Written out, as small exponents could not be read on a phone.
    axes.yaxis.set_major_formatter("{x:.0e}")
    axes.set(xlabel="step", ylabel="norm of the cotangent", xlim=(0, STEPS))
    axes.set_title("The backward pass goes from right to left", fontsize=14)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
