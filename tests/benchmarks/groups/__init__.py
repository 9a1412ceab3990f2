"""The comparisons, a family of them a file. No measuring happens here."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .._comparison import Comparison
from ._budget import budget, million
from ._debug import debug
from ._frontier import frontier
from ._length import length
from ._maps import maps
from ._progress import progress
from ._recurrent import batched, compilation, heavy, modes, recurrent, scaling
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
    """

    title: str
    about: str
    comparisons: Callable[[], Sequence[Comparison]]


GROUPS: Mapping[str, Group] = {
    "length": Group(
        "As the loop grows longer",
        "The recurrent step, run 256 to 65,536 times. The loops nested by hand and "
        "powerpax's have as many chunks as there are steps in a chunk; Equinox chooses "
        "its own number of slots; brainstate has its default base of 16, and is left "
        "out of the longest loop, for its time grows with the square of the length. "
        '`Budget` is `Budget("1MiB")`.',
        length,
    ),
    "frontier": Group(
        "Time against memory",
        "The recurrent step, run 4096 times: each library at several of its settings, "
        "and the plans that `Budget` chooses, from the least memory that is feasible. "
        "Lower and further to the left is better.",
        frontier,
    ),
    "recurrent": Group(
        "One loop, every schedule",
        "The same loop at single settings, run more often, with what each schedule is "
        "meant to reach.",
        recurrent,
    ),
    "scaling": Group(
        "A step in a short loop and in a long one",
        "What a schedule takes for each step should not grow with the loop.",
        scaling,
    ),
    "compilation": Group(
        "Tracing and compiling a loop",
        "Each program is compiled several times from nothing.",
        compilation,
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
