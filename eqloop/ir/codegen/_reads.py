"""Which equations are written, and what of their operands the text reads."""

import functools
from collections.abc import Sequence

import jax.core
import jax.extend.core as jex
import numpy as np

from ... import progress
from ..._compat import called_back
from .._atoms import Closed, Definitions, dtype_of


def written(
    jaxpr: Closed, definitions: Definitions
) -> tuple[list[jex.JaxprEqn], set[jex.Var]]:
    """The equations of which something is read, and the variables that are read."""
    read = {atom for atom in jaxpr.jaxpr.outvars if isinstance(atom, jex.Var)}
    needed: list[jex.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.outvars and not eqn.effects and read.isdisjoint(eqn.outvars):
            continue
        operands = _operands(eqn, definitions)
        read.update(atom for atom in operands if isinstance(atom, jex.Var))
        needed.append(eqn)
    return needed[::-1], read


def reads_index(eqn: jex.JaxprEqn, index: jex.JaxprEqn | None) -> bool:
    """Whether an equation is written with its first operand, which another computes."""
    # A `cond` is not, if that is a boolean turned into a number, or the platform.
    if eqn.primitive.name != "cond" or index is None:
        return True
    if index.primitive.name == "platform_index":
        return False
    return not (
        len(eqn.params["branches"]) == 2
        and index.primitive.name == "convert_element_type"
        and dtype_of(index.invars[0]) == np.bool_
    )


def reads_updates(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is written with its updates."""
    # A `scatter` that applies a function to what is there has some that nobody reads.
    function = eqn.params.get("update_jaxpr")
    if eqn.primitive.name != "scatter" or function is None:
        return True
    updates = function.invars[1]
    operands = [atom for inner in function.eqns for atom in inner.invars]
    return any(atom is updates for atom in (*operands, *function.outvars))


def is_report(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation tells a progress bar of this library how far a loop is."""
    report = called_back(eqn)
    if not isinstance(report, functools.partial):
        return False
    module = getattr(report.func, "__module__", None) or ""
    return module.startswith(progress.__name__)


def _operands(eqn: jex.JaxprEqn, definitions: Definitions) -> Sequence[jax.core.Atom]:
    first = eqn.invars[0] if eqn.invars else None
    index = definitions.get(first) if isinstance(first, jex.Var) else None
    if index is not None and not reads_index(eqn, index):
        return [*index.invars, *eqn.invars[1:]]
    if is_report(eqn):
        return ()
    return eqn.invars if reads_updates(eqn) else eqn.invars[:2]
