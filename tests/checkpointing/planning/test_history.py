"""What is drawn of a gradient is what the layouts count."""

import pytest

from eqloop.checkpointing.engine._layout import Nested, Revolved, Stored
from eqloop.checkpointing.engine._levels import Nest, nests
from eqloop.checkpointing.planning._history import history

LAYOUTS = [
    Stored(7),
    Nested((Nest((7,)),)),
    Nested((Nest((3, 2, 4)), Nest((2, 2)), Nest((3,)))),
    Nested((Nest((3, 2), 4), Nest((1,), 3))),
    Nested(nests(100, 3)),
    *(Revolved(n, s, b) for n in (1, 2, 9, 31) for s in (1, 2, 5) for b in (1, 2, 4)),
    Revolved(100, 200),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_history_is_what_the_layout_counts(layout):
    events = list(history(layout))
    of = lambda kind: [event for event in events if event.kind == kind]
    length = layout.length
    assert [e.position for e in of("primal")] == list(range(length))
    assert [e.position for e in of("reversal")] == list(reversed(range(length)))
    # A single step is evaluated where it is reversed, a block once before.
    in_blocks = sum(e.residuals > 1 for e in of("reversal"))
    singles = 0 if isinstance(layout, Stored) else length
    evaluations = length + len(of("again")) + singles
    blocks_evaluated = evaluations - layout.evaluations
    assert blocks_evaluated == sum(
        e.kind == "again" and e.residuals > 0 for e in events
    )
    assert in_blocks <= length
    assert max(e.slots for e in events) == layout.slots or isinstance(layout, Revolved)
    assert max(e.slots for e in events) <= layout.slots
