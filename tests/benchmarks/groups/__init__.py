"""The comparisons, a family of them a file. No measuring happens here."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from .._comparison import Comparison
from ._ablation import ablation
from ._budget import budget, million
from ._buffers import buffers
from ._calls import calls
from ._cells import cells
from ._convolutions import convolutions
from ._debug import debug
from ._diffrax import diffrax
from ._frontier import frontier
from ._gigabytes import gigabytes
from ._length import length
from ._maps import maps
from ._progress import progress
from ._recurrent import batched, heavy, modes, recurrent, scaling
from ._regret import regret
from ._resumable import resumable
from ._sliced import sliced
from ._slots import slots
from ._stacked_layers import stacked_layers
from ._startup import Startup, compiling, importing, planning, tracing
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
    comparisons: Callable[[], Iterable[Comparison | Startup]]
    figures_in: str | None = None


GROUPS: Mapping[str, Group] = {
    "gigabytes": Group(
        "A gradient of gigabytes",
        "The loop of the front page: a batch of sequences, and 10,000 steps.",
        gigabytes,
    ),
    "frontier": Group(
        "Time against memory",
        "The recurrent step, run 4096 times. Each library is measured at several of "
        "its settings, and `Budget` from the least memory that is feasible. Lower and "
        "further to the left is better.",
        frontier,
    ),
    "length": Group(
        "As the loop grows longer",
        "The recurrent step, run 256 to 65,536 times. Powerpax and the loops nested by "
        "hand run chunks of the square root of the number of steps. Equinox and "
        "brainstate have their defaults; the time of brainstate grows with the square "
        'of the number of steps. `Budget` is `Budget("1MiB")`.',
        length,
    ),
    "recurrent": Group(
        "One loop, every schedule",
        "More schedules on the same loop.",
        recurrent,
    ),
    "cells": Group(
        "Recurrent cells",
        "Cells of Equinox, single and in batches. Their steps are reversed one by one, "
        "or [together](how_it_works.md#steps-reversed-together).",
        cells,
    ),
    "scaling": Group(
        "A step in a short loop and in a long one",
        "The time of a step should not grow with the loop.",
        scaling,
        figures_in="length",
    ),
    "batched": Group(
        "A batch of sequences",
        "The recurrent step under `vmap`.",
        batched,
    ),
    "modes": Group(
        "Where nothing is reversed",
        "Values and tangents, for which a schedule should cost nothing.",
        modes,
    ),
    "heavy": Group(
        "A large carry",
        "Leapfrog for the wave equation on a grid: a large carry, and a heavy step.",
        heavy,
    ),
    "budget": Group(
        "Budgets",
        "Budgets that double from one to the next, on four different steps. The "
        "claims: each budget is kept, the plan predicts the memory of the program, and "
        "more memory is never slower.",
        budget,
    ),
    "regret": Group(
        "Budgets and the fastest plan that fits",
        "Steps of many kinds, each with budgets of 0.6, 0.2, 0.05 and 0.015 of what "
        "storing everything takes, or the least that is feasible. A budget is compared "
        "with the fastest of all the other loops that fit into the same memory, and "
        "with the time that its plan predicted.",
        regret,
    ),
    "million": Group(
        "A million steps in 64 MiB",
        "`Budget`, and two scans nested by hand.",
        million,
    ),
    "maps": Group(
        "Maps in chunks",
        "A multilayer perceptron over many rows: chunks that divide the number of rows "
        "and chunks that do not, gradient accumulation, and chunks that fit a budget.",
        maps,
    ),
    "convolutions": Group(
        "Convolutions in loops",
        "On a CPU, XLA does not lay them out for its library in the body of a loop: "
        "[ours does](recipes/convolutions.md).",
        convolutions,
    ),
    "slots": Group(
        "What slots hold",
        "Leaves of the carry that no reversal reads, rows that are only written, and "
        "slots in a lower precision, in files, or replaced by an inverse.",
        slots,
    ),
    "buffers": Group(
        "An array that a loop fills",
        "The carry has an array with a row for each step, which writes it. JAX's "
        "derivative of such a scan copies the whole array at each step, so its time "
        "grows with the square of the number of steps.",
        buffers,
    ),
    "sliced": Group(
        "Some of the outputs",
        "A scan that keeps every tenth output.",
        sliced,
    ),
    "while": Group(
        "While loops",
        "Loops whose number of steps is not known before they run.",
        whiles,
    ),
    "diffrax": Group(
        "Differential equations",
        "The gradient of a solve by Diffrax, under its own adjoint and under "
        "[`CheckpointedAdjoint`](api/diffrax.md).",
        diffrax,
    ),
    "layers": Group(
        "Stacked layers",
        "A stack of equal transformer layers, and a Python loop over them. The time to "
        "stack them is included.",
        stacked_layers,
    ),
    "calls": Group(
        "Calls",
        "The overhead of a call: small programs, called over and over from Python, "
        "outside of `jit` and under it. The first call is shown as tracing and "
        "compiling. The last table shows the first plan for a step with many leaves, "
        "and later plans for a new function that does the same.",
        calls,
    ),
    "importing": Group(
        "Importing",
        "Processor time of `import eqloop`, and of the first loop that is made.",
        importing,
    ),
    "tracing": Group(
        "Tracing a carry of a thousand leaves",
        "Processor time, and that of calls of what is compiled.",
        tracing,
    ),
    "compiling": Group(
        "Compiling a gradient",
        "Processor time to trace, lower and compile, with empty caches, in turn.",
        compiling,
    ),
    "planning": Group(
        "Planning a loop",
        "Processor time, and programs that are compiled: of the first plan, and of "
        "later plans for the same step.",
        planning,
    ),
    "resumable": Group(
        "Loops in segments",
        "A loop that is written to disk every second, and the same loop in one call. "
        "The times include compiling.",
        resumable,
    ),
    "progress": Group(
        "Progress bars",
        "What a progress bar costs in a loop with a cheap step.",
        progress,
    ),
    "debug": Group(
        "Looking out for NaN and infinity",
        "What `DebugNonFinite` costs while nothing is found.",
        debug,
    ),
    "ablation": Group(
        "Without the special cases",
        "Programs as they are, and with one special case of the package switched off: "
        "a kind of candidate of `Budget`, or a rewriting. "
        "[How it works](how_plans_are_made.md#what-the-special-cases-gain) sums it up.",
        ablation,
    ),
}
