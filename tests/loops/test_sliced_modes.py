"""`SlicedScan` in every mode and context, against a scan that is sliced afterwards."""

from typing import Any

import jax
import pytest

import eqloop as el

from ..derivatives import CONTEXTS, MODES, assert_agrees, name
from ..schedules import BLOCKS, LAST, NESTED, STORING

# Of seven steps: the last is kept, so that the first is run by itself; and one that
# leaves steps over at both ends.
SLICES = (slice(None, None, 3), slice(1, 6, 2))
SCHEDULES = (STORING, NESTED, BLOCKS, LAST)


def ours(kept: slice, schedule: Any) -> Any:
    def loop(f: Any, init: Any, xs: Any, **settings: Any) -> Any:
        kept_by = {"start": kept.start, "stop": kept.stop, "step": kept.step}
        scan = el.SlicedScan(f, schedule=schedule, **kept_by, **settings)
        return scan(init, xs)

    return loop


def theirs(kept: slice) -> Any:
    def loop(f: Any, init: Any, xs: Any, **settings: Any) -> Any:
        carry, ys = jax.lax.scan(f, init, xs, **settings)
        return carry, jax.tree.map(lambda y: y[kept], ys)

    return loop


THEIRS = [theirs(kept) for kept in SLICES]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "context", [c for c in CONTEXTS if name(c) != "in_cond"], ids=name
)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_all_modes_in_all_contexts(mode, context, schedule):
    i = (MODES.index(mode) + CONTEXTS.index(context)) % 2
    assert_agrees(mode, context, ours(SLICES[i], schedule), THEIRS[i])
