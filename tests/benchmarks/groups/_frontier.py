"""Time against memory, for one loop: every library at several of its settings."""

from collections.abc import Sequence

import eqloop as el

from .. import _loops as loops
from .._comparison import Comparison
from .._problems import gradient
from .._problems import recurrent as problem
from ._budget import MEBI, budgets


def frontier() -> Sequence[Comparison]:
    """Budgets from the least that is feasible up to where nothing is gained."""
    args = problem(4096)
    rows = [
        loops.lax_scan(),
        loops.lax_scan_of_remat(),
        *(loops.nested(*by) for by in ((64, 64), (16, 16, 16), (8, 8, 8, 8))),
        *(loops.powerpax(size) for size in (16, 64, 256)),
        *(loops.equinox(slots) for slots in (8, 30, None, 256)),
        *(loops.brainstate(base) for base in (4, 16, 64)),
        loops.ours(el.Recursive(16)),
        loops.ours(el.Binomial(30)),
        *(loops.ours(el.Budget(n)) for n in budgets(args) if n <= 8 * MEBI),
    ]
    return [
        Comparison(
            "Gradient of W, h0 and xs: recurrent step, 4096 steps, width 64",
            [loop.case(gradient, args) for loop in rows],
            rounds=9,
        )
    ]
