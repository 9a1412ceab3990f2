"""What a loop takes as it gets longer."""

import math
from collections.abc import Iterator, Sequence

import eqloop as el

from .. import _loops as loops
from .._comparison import Comparison
from .._problems import gradient
from .._problems import recurrent as problem

LENGTHS = (256, 1024, 4096, 16384, 65536)
# brainstate's time comes to grow with the square of the number of steps.
BRAINSTATE_AT_MOST = 16384


def length() -> Sequence[Comparison]:
    """Each loop at its default settings, or with as many chunks as steps in a chunk."""
    return [_at(steps) for steps in LENGTHS]


def _at(steps: int) -> Comparison:
    args = problem(steps)
    return Comparison(
        f"Gradient of W, h0 and xs: recurrent step, {steps} steps, width 64",
        [loop.case(gradient, args) for loop in _loops(steps)],
        rounds=5,
        compile_rounds=3,
        size=steps,
    )


def _loops(steps: int) -> Iterator[loops.Loop]:
    root = math.isqrt(steps)
    yield loops.lax_scan()
    yield loops.lax_scan_of_remat()
    yield loops.nested(root, root)
    yield loops.powerpax(root)
    yield loops.equinox()
    if steps <= BRAINSTATE_AT_MOST:
        yield loops.brainstate(16)
    yield loops.ours(el.Recursive(16))
    yield loops.ours(el.Binomial(30))
    yield loops.ours(el.Budget("1MiB"))
