"""Draws the picture of the front page: `python docs/images/gigabytes.py`.

It compiles the program of the README for loops of several lengths, runs none of them,
and draws the temporary memory that XLA reports.
"""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
LENGTHS = [2_000, 10_000, 100_000]
THEIRS, OURS = "#b3261e", "#0060b0"


class Plain(eqx.Module):
    """`jax.lax.scan` over a cell, called as a scan of eqloop is."""

    f: eqx.Module

    def __call__(self, init, xs):
        """The last carry, and no outputs."""
        return jax.lax.scan(lambda h, x: self.f(h, x), init, xs)


def gigabytes(gradient, loop, length):
    """What the gradient allocates in addition to its inputs and outputs."""
    compiled = gradient.lower(loop, jnp.zeros((32, length, 8))).compile().compiled
    return compiled.memory_analysis().temp_size_in_bytes / 1e9


def program():
    """The names that the README's program defines, without its last line."""
    names = {"__name__": "readme"}
    (code, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code.rstrip().rpartition("\n")[0], names)
    return names


def draw(axes: Axes, theirs: list[float], ours: list[float]) -> None:
    """Both lines, with their names beside them."""
    thousands = [0, *(length / 1000 for length in LENGTHS)]
    theirs, ours = [0, *theirs], [ours[0], *ours]
    axes.fill_between(thousands, theirs, color=THEIRS, alpha=0.08, lw=0)
    axes.plot(thousands, theirs, color=THEIRS, linewidth=2.5)
    axes.plot(thousands, ours, color=OURS, linewidth=4, solid_capstyle="butt")
    for top, name in ((16, "a laptop: 16 GB"), (24, "a GPU: 24 GB")):
        axes.axhline(top, color="0.6", linewidth=1, linestyle=(0, (4, 4)), zorder=0)
        axes.text(1, top + 0.5, name, color="0.35", fontsize=10.5)
    axes.text(57, 11.5, "jax.lax.scan", color=THEIRS, weight="bold", fontsize=13)
    ours_name = 'eqloop, Budget("256MiB")'
    axes.text(33, 1.2, ours_name, color=OURS, weight="bold", fontsize=13)
    axes.set(xlim=(0, 100), ylim=(0, 31), xlabel="steps, in thousands", ylabel="GB")
    axes.set_title("Memory that a gradient takes", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Compiles the programs, and draws the picture."""
    names = program()
    gradient, cell = names["gradient"], names["loop"].f
    theirs = [gigabytes(gradient, Plain(cell), length) for length in LENGTHS]
    ours = [gigabytes(gradient, names["loop"], length) for length in LENGTHS]
    save(theirs, ours)


def save(theirs: list[float], ours: list[float]) -> None:
    """Writes the picture, the same bytes each time."""
    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "eqloop", "font.size": 12})
    figure, axes = pyplot.subplots(figsize=(5.4, 3.6), layout="constrained")
    draw(axes, theirs, ours)
    told = f"lax.scan: {max(theirs):.1f} GB, eqloop: {max(ours):.3f} GB"
    metadata = {"Date": None, "Description": f"At 100,000 steps, {told}"}
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata=metadata)


if __name__ == "__main__":
    main()
