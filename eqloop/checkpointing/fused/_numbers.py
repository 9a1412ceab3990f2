"""Evaluates the program of one row, number by number, for a block of rows at once.

What only moves entries computes nothing. Its primitive is run on their positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

from ..._programs import aval_of
from ..._types import Value
from ._classes import ELEMENTWISE, SCATTERS, refuse
from ._control import cond, scan, while_loop
from ._elementwise import bound
from ._entries import parts_of
from ._indexing import dynamic_slice, gather, scatter, update_slice
from ._moves import MOVES, iota, moved
from ._parts import KEYS, iota_pair, key_bits, of_parts, threefry, unwrap, wrap
from ._products import added_products, dot, has_products
from ._reductions import (
    REDUCTIONS,
    any_of_block,
    arg_of,
    cumulated,
    reduced,
    sort_rows,
    top_k,
)
from ._scope import BlockScope, closed_of, mapped, of_array
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
            given = list(map(read, eqn.invars))
            if eqn.primitive.name in ("jit", "pjit", "closed_call"):
                outs = self.run(closed_of(eqn.params["jaxpr"]), given)
            else:
                outs = _evaluate(scope, eqn, given)
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))


_RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    **dict.fromkeys(MOVES, moved),
    **dict.fromkeys((n for n in REDUCTIONS if n.startswith("reduce")), reduced),
    **dict.fromkeys((n for n in REDUCTIONS if n.startswith("cum")), cumulated),
    "argmax": arg_of,
    "argmin": arg_of,
    "dot_general": dot,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": update_slice,
    "gather": gather,
    **dict.fromkeys(SCATTERS, scatter),
    "sort": sort_rows,
    "top_k": top_k,
    "iota": iota,
    "while": while_loop,
    "unvmap_any": any_of_block,
    "cond": cond,
    "scan": scan,
    **dict.fromkeys(KEYS, key_bits),
    "threefry2x32": threefry,
    "iota_2x32_shape": iota_pair,
    "random_unwrap": unwrap,
    "random_wrap": wrap,
}


def _evaluate(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    name = eqn.primitive.name
    if name in ("add", "add_any") and all(map(has_products, ins)):
        sums = mapped(added_products, *ins)
        if all(x is not None for x in sums.reshape(-1)):
            return [sums]
    if (rule := _RULES.get(name)) is not None:
        return rule(scope, eqn, ins)
    if name not in ELEMENTWISE:
        refuse(eqn)
    avals = [*map(aval_of, eqn.invars), aval_of(eqn.outvars[0])]
    if any(parts_of(aval.dtype)[0] > 1 for aval in avals):
        return of_parts(scope, eqn, ins)
    of = lambda *xs: bound(eqn, [scope.value(x) for x in xs])
    return [mapped(of, *ins)]
