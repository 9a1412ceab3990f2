"""The comparisons, a family of them a file. No measuring happens here."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .._comparison import Comparison
from ._budget import budget, million
from ._cells import cells
from ._debug import debug
from ._frontier import frontier
from ._length import length
from ._maps import maps
from ._progress import progress
from ._recurrent import batched, compilation, heavy, modes, recurrent, scaling
from ._resumable import resumable
from ._sliced import sliced
from ._stacked_layers import stacked_layers
from ._while import whiles


@dataclasses.dataclass(frozen=True)
class Group:
    """Comparisons that belong together.

    Args:
        title: the heading of their section.
        about: what they show, in a sentence or two.
        comparisons: makes them.
        figures_in: the group that shows the figures of its loops, if it has nothing of
            its own to show but claims.
    """

    title: str
    about: str
    comparisons: Callable[[], Sequence[Comparison]]
    figures_in: str | None = None


GROUPS: Mapping[str, Group] = {
    "frontier": Group(
        "Time against memory",
        "The recurrent step, run 4096 times: each library at several of its settings, "
        "and the plans that `Budget` chooses, from the least memory that is feasible. "
        "Lower and further to the left is better.",
        frontier,
    ),
    "length": Group(
        "As the loop grows longer",
        "The recurrent step, run 256 to 65,536 times. The loops nested by hand and "
        "powerpax's have as many chunks as there are steps in a chunk; Equinox chooses "
        "its own number of slots; brainstate has its default base of 16, and is left "
        "out of the longest loop, since its time comes to grow with the square of the "
        'number of steps. `Budget` is `Budget("1MiB")`.',
        length,
    ),
    "recurrent": Group(
        "One loop, every schedule",
        "More schedules on the same loop, beside some of those above, and what each "
        "is meant to reach.",
        recurrent,
    ),
    "cells": Group(
        "Recurrent cells",
        "Cells of Equinox, single and in batches, whose steps are reversed one by one "
        "and together.",
        cells,
    ),
    "scaling": Group(
        "A step in a short loop and in a long one",
        "What a schedule takes for each step should not grow with the loop. A short "
        "loop and a long one are run in turn.",
        scaling,
        figures_in="length",
    ),
    "compilation": Group(
        "Tracing and compiling a loop",
        "Each program is compiled several times from nothing, in turn.",
        compilation,
        figures_in="frontier",
    ),
    "batched": Group(
        "A batch of sequences",
        "The loop under `vmap`, with one gradient of the weights for the whole batch.",
        batched,
    ),
    "modes": Group(
        "Where nothing is reversed",
        "The value of a loop and its tangents need no schedule, and should not pay "
        "for one.",
        modes,
    ),
    "heavy": Group(
        "A large carry",
        "A step whose work and carry are large beside the loop's own: leapfrog of the "
        "wave equation on a grid.",
        heavy,
    ),
    "budget": Group(
        "Budgets",
        "Every budget, by factors of two, on four quite different steps: that it is "
        "held, that the plan knew what the program would take, and that more memory "
        "is never slower.",
        budget,
    ),
    "million": Group(
        "A million steps in 64 MiB",
        "Beside two scans nested by hand.",
        million,
    ),
    "maps": Group(
        "Maps in chunks",
        "A multilayer perceptron over many rows, in chunks that divide their number "
        "and in chunks that do not; gradients added up; chunks that fit a budget.",
        maps,
    ),
    "sliced": Group(
        "Some of the outputs",
        "A scan of which only every tenth output is kept.",
        sliced,
    ),
    "while": Group(
        "While loops",
        "The number of steps is found out as they are run.",
        whiles,
    ),
    "layers": Group(
        "Stacked layers",
        "A stack of equal transformer layers, beside a Python loop over them. Both are "
        "given a list of layers, so that the stacking is part of what is measured.",
        stacked_layers,
    ),
    "resumable": Group(
        "Loops in segments",
        "A loop that is stored every second, so that it can go on in another process, "
        "beside one that is not. Both compile what they run within the time shown.",
        resumable,
    ),
    "progress": Group(
        "Progress bars",
        "What a bar adds to a cheap step.",
        progress,
    ),
    "debug": Group(
        "Looking out for NaN and infinity",
        "What `DebugNonFinite` costs while nothing is found.",
        debug,
    ),
}
