"""Evaluates the program of one row, number by number, for a block of rows at once.

What only moves entries computes nothing. Its primitive is run on their positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from ..._types import Value
from ._control import cond, while_loop
from ._elementwise import elementwise, summed, unwrapped, wrapped
from ._indexing import dynamic_slice
from ._moves import MOVES, moved
from ._products import added_products, dot, has_products
from ._scope import BlockScope, any_of_block, mapped, of_array
from ._tiles import NotTiledError, Tiles


class Numbers:
    """Evaluates programs for a block of rows.

    Attributes:
        block: How many rows that are.
        tiles: Multiplies by larger matrices; `None` to write out all products.
    """

    def __init__(self, block: int, tiles: Tiles | None = None):
        self.block, self.tiles = block, tiles

    def outer(self, array: np.ndarray, dtype: Any) -> Value:
        """The sum over the rows of the block of a matrix of products, as a tile."""
        if self.tiles is None:
            raise NotTiledError
        return self.tiles.outer(BlockScope(self.block), array, dtype)

    def run(self, closed: jex.ClosedJaxpr, ins: Sequence[np.ndarray]) -> list[Any]:
        """The outputs of a program, given its inputs."""
        scope = BlockScope(self.block, self.tiles, self.run)
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = of_array(value)
        read = lambda x: of_array(x.val) if isinstance(x, jex.Literal) else env[x]
        for eqn in jaxpr.eqns:
            outs = _evaluate(scope, eqn, list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))


_RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    **dict.fromkeys(MOVES, moved),
    "reduce_sum": summed,
    "dot_general": dot,
    "dynamic_slice": dynamic_slice,
    "while": while_loop,
    "cond": cond,
    "unvmap_any": any_of_block,
    "random_unwrap": unwrapped,
    "random_wrap": wrapped,
}


def _evaluate(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    if eqn.primitive.name in ("add", "add_any") and all(map(has_products, ins)):
        sums = mapped(added_products, *ins)
        if all(x is not None for x in sums.reshape(-1)):
            return [sums]
    return _RULES.get(eqn.primitive.name, elementwise)(scope, eqn, ins)
