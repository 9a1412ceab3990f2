"""What is drawn of a gradient is what the orders count."""

import pytest

from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._first_and_last import FirstAndLast
from eqloop.checkpointing.engine.orders._levels import Nest, nests
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.orders._segmented import Segmented

LAST = [
    FirstAndLast(first, AllAtOnce(steps))
    for steps in (1, 4)
    for first in (
        Nested((Nest((3,)),)),
        Nested((Nest((3, 2), 4), Nest((1,), 3))),
        Revolved(9, 2),
    )
]

ORDERS = [
    AllAtOnce(7),
    Nested((Nest((7,)),)),
    Nested((Nest((3, 2, 4)), Nest((2, 2)), Nest((3,)))),
    Nested((Nest((3, 2), 4), Nest((1,), 3))),
    Nested(nests(100, 3)),
    *(Revolved(n, s, b) for n in (1, 2, 9, 31) for s in (1, 2, 5) for b in (1, 2, 4)),
    Revolved(100, 200),
    *LAST,
    *(order.by_carries() for order in LAST),
    *(Segmented(((2, order.as_part()),)) for order in LAST),
    Segmented(((3, AllAtOnce(4).as_part()), (1, AllAtOnce(2).by_carries()))),
    Segmented(((2, Revolved(9, 2)), (1, Nested(nests(20, 3))), (2, Revolved(7, 2, 3)))),
    Segmented(((2, Segmented(((3, Revolved(4, 2)),))), (1, Nested((Nest((3,)),))))),
]


@pytest.mark.parametrize("order", ORDERS, ids=repr)
def test_history_is_what_the_order_counts(order):
    events = list(order.history())
    of = lambda kind: [event for event in events if event.kind == kind]
    length = order.length
    assert [e.position for e in of("primal")] == list(range(length))
    assert [e.position for e in of("reversal")] == list(reversed(range(length)))
    # A single step is evaluated where it is reversed, a block once before.
    in_blocks = sum(e.residuals > 1 for e in of("reversal"))
    stored = length if order.stores_residuals else order.steps_with_residuals
    singles = length - stored
    evaluations = length + len(of("again")) + singles
    blocks_evaluated = evaluations - order.evaluations
    assert blocks_evaluated == sum(
        e.kind == "again" and e.residuals > 0 for e in events
    )
    assert in_blocks <= length
    assert max(e.slots for e in events) == order.slots or isinstance(order, Revolved)
    assert max(e.slots for e in events) <= order.slots
