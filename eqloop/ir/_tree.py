"""Jaxprs as trees of text, for where nothing can be drawn."""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex

from .._arrays import describe
from ._atoms import Closed
from ._parts import parts, title


def tree(jaxpr: Closed, name: str) -> str:
    """A jaxpr as a tree: operations with the types of their operands and results."""
    types = _types(jaxpr.in_avals, jaxpr.out_avals)
    return "\n".join([f"{name}: {types}", *_equations(jaxpr)])


def _equations(jaxpr: Closed) -> Iterator[str]:
    for i, eqn in enumerate(jaxpr.eqns):
        is_last = i == len(jaxpr.eqns) - 1
        ins, outs = ([atom.aval for atom in v] for v in (eqn.invars, eqn.outvars))
        yield f"{'└' if is_last else '├'}── {title(eqn)}: {_types(ins, outs)}"
        margin = "    " if is_last else "│   "
        yield from (f"{margin}{line}" for line in _lines_inside(eqn))


def _lines_inside(eqn: jex.JaxprEqn) -> Iterator[str]:
    found = parts(eqn)
    if len(found) == 1:
        yield from _equations(found[0].jaxpr)
        return
    for part in found:
        is_last = part is found[-1]
        types = _types(part.jaxpr.in_avals, part.jaxpr.out_avals)
        yield f"{'└' if is_last else '├'}── {part.label}: {types}"
        margin = "    " if is_last else "│   "
        yield from (f"{margin}{line}" for line in _equations(part.jaxpr))


def _types(ins: Any, outs: Any) -> str:
    before, after = (", ".join(map(describe, avals)) or "()" for avals in (ins, outs))
    return f"{before} -> {after}"
