"""Divides a program in two: what depends on known inputs only, and the rest."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.extend.core as jex

from .._arrays import Flags, pick
from ._effects import does_something, is_ref
from ._equations import aval_of
from ._jaxprs import pruned, with_parts


@functools.lru_cache(maxsize=512)
def parted(
    program: jex.ClosedJaxpr, known: Flags
) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]:
    """Divides a program in two: what depends on known inputs only, and the rest.

    The rest takes what the first returns, and then the other inputs.
    """
    # Values that depend on no input at all, such as zeros of some shape, are computed
    # in both: that is cheaper than to store them. There is no dead code in the program,
    # or values would be handed on for it.
    jaxpr = program.jaxpr
    ranks = _ranks(jaxpr, known)
    first = [eqn for eqn in jaxpr.eqns if _rank(eqn, ranks) <= _DECIDED]
    rest = [eqn for eqn in jaxpr.eqns if _rank(eqn, ranks) != _DECIDED]
    decided = {var for var, rank in ranks.items() if rank == _DECIDED}
    read = [var for eqn in rest for var in eqn.invars] + list(jaxpr.outvars)
    needed = [var for var in read if isinstance(var, jex.Var) and var in decided]
    handed = list(dict.fromkeys(needed))
    others = pick(jaxpr.invars, [not flag for flag in known])
    of_known = pick(jaxpr.invars, known)
    one = with_parts(program, invars=of_known, eqns=first, outvars=handed)
    two = with_parts(program, invars=[*handed, *others], eqns=rest)
    return pruned(one), pruned(two)


# What a value depends on: on nothing, on known inputs only, or on others.
_FREE, _DECIDED, _OPEN = range(3)


def _ranks(jaxpr: jex.Jaxpr, known: Flags) -> dict[Any, int]:
    """The ranks of the variables in a program."""
    ranks = dict[Any, int].fromkeys(jaxpr.constvars, _FREE)
    for var, is_known in zip(jaxpr.invars, known, strict=True):
        ranks[var] = _DECIDED if is_known else _OPEN
    before = None
    while ranks != before:
        before = dict(ranks)
        for eqn in jaxpr.eqns:
            # Whoever is given a reference may write to it. So all that is done to one
            # has one rank, and stays in its order.
            refs = [x for x in eqn.invars if is_ref(aval_of(x))]
            ranks |= dict.fromkeys([*refs, *eqn.outvars], _rank(eqn, ranks))
    return ranks


def _rank(eqn: jex.JaxprEqn, ranks: Mapping[Any, int]) -> int:
    """The rank of an equation. What is more than a value happens in one program."""
    least = _DECIDED if does_something(eqn.effects) else _FREE
    both = [x for x in [*eqn.invars, *eqn.outvars] if isinstance(x, jex.Var)]
    return max(least, *(ranks.get(x, _FREE) for x in both), _FREE)
