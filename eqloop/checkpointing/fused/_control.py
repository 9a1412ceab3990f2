"""Loops and branches in a step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import closed_under
from ..._compat import close
from ..._programs import aval_of, reached
from ..._types import Value
from ._elementwise import chosen
from ._entries import Parts, is_known
from ._pallas import in_own_register
from ._scope import BlockScope, any_row, arrays_of, numbers_of
from ._tpu import shape_of


def _differ(scope: BlockScope, arrays: Sequence[np.ndarray]) -> list[bool]:
    """For each array, whether rows of the block have other numbers in it."""

    def differs(x: Any) -> bool:
        if isinstance(x, Parts):
            return any(map(differs, x.values))
        return np.ndim(scope.value(x)) > 0

    return [any(map(differs, a.reshape(-1))) for a in arrays]


def _settled_marks(body: Any, consts: list[bool], carry: list[bool]) -> list[bool]:
    """Which leaves of a carry differ between rows, after any number of steps."""
    outs = lambda carry: reached(body, (*consts, *carry))[: len(carry)]
    return closed_under(carry, outs)


def while_loop(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    cond, body = close(p["cond_jaxpr"]), close(p["body_jaxpr"])
    of_cond, of_body, init = ins[:n], ins[n : n + m], ins[n + m :]
    avals = [aval_of(v) for v in eqn.invars[n + m :]]
    dtypes = [aval.dtype for aval in avals]
    differ = _settled_marks(body, _differ(scope, of_body), _differ(scope, init))
    own = reached(cond, (*_differ(scope, of_cond), *differ))[0]
    # If rows stop by themselves, what they carry differs, too.
    differ = [True] * len(differ) if own else differ

    def pred(values: Sequence[Value]) -> Value:
        (found,) = scope.run(cond, [*of_cond, *arrays_of(values, avals)])
        return BlockScope(scope.block).value(found[()])

    def going(values: Sequence[Value]) -> Value:
        return any_row(jnp.asarray(pred(values), bool))

    def move(values: Sequence[Value]) -> list[Value]:
        outs = scope.run(body, [*of_body, *arrays_of(values, avals)])
        new = numbers_of(BlockScope(scope.block), outs, dtypes, differ)
        new = [in_own_register(x, scope.block) for x in new]
        if not own:
            return new
        goes_on = jnp.broadcast_to(pred(values), shape_of(scope.block))
        return [jnp.where(goes_on, a, b) for a, b in zip(new, values, strict=True)]

    init = numbers_of(scope, init, dtypes, differ)
    init = [in_own_register(x, scope.block) for x in init]
    return arrays_of(lax.while_loop(going, move, init), avals)


def cond(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    index, *given = ins
    at = scope.value(index[()])
    branches = eqn.params["branches"]
    avals = [aval_of(v) for v in eqn.outvars]
    dtypes = [aval.dtype for aval in avals]
    if is_known(at):
        return scope.run(branches[min(max(int(at), 0), len(branches) - 1)], given)
    # What rows share is a scalar, as long as they all take the same branch.
    marks = tuple(_differ(scope, given))
    each = [reached(close(branch), marks) for branch in branches]
    own = np.ndim(at) > 0
    differ = [own or any(flags) for flags in zip(*each, strict=True)]

    def run(branch: Any) -> list[Value]:
        made = scope.run(branch, given)
        found = numbers_of(BlockScope(scope.block), made, dtypes, differ)
        # Pallas takes no literal as the result of a branch.
        return [jnp.where(at >= 0, x, x) for x in found]

    at = jnp.minimum(
        jnp.maximum(jnp.asarray(at).astype(jnp.int32), 0), len(branches) - 1
    )
    if own:
        made = [run(branch) for branch in branches]
        found = [chosen(at, c, c[0].dtype) for c in zip(*made, strict=True)]
    else:
        found = lax.switch(at, [functools.partial(run, b) for b in branches])
    return arrays_of(found, avals)
