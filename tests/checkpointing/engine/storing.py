"""A schedule whose primal stores products."""

import dataclasses

import eqloop as el
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._together import Together


@dataclasses.dataclass(frozen=True)
class Storing(el.AbstractSchedule):
    """Nests, for some of which, the last ones, the primal stores products."""

    nests: tuple[Nest, ...] = (Nest((3, 4)), Nest((1,)))
    with_products: int = 2
    size: int = 2

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return el.Layout(
            Nested(self.nests, self.with_products), reversal=Together(self.size)
        )
