"""Programs in which loops take and give no more than is needed of them.

JAX keeps or drops an equation of this library as a whole: if one of its outputs is
needed, then so are all of its inputs. The rows that a loop in a step writes would be
needed for the counter beside them, and so be stored in every slot.
"""

import functools
import operator

import jax
import jax.core
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ...._arrays import Flags, pick, zero_array
from ...._compat import is_through
from ...._programs import formula_of, renamed


@functools.lru_cache(maxsize=512)
def lean(program: jex.ClosedJaxpr, used: Flags) -> jex.ClosedJaxpr:
    """A program with the same inputs, and those of its outputs that are used.

    It is not to be differentiated: what a derivative reads may be more.
    """
    jaxpr = _underived(program.jaxpr)
    while True:
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, list(used), instantiate=True)
        eqns = _leaner(jaxpr)
        if all(map(operator.is_, eqns, jaxpr.eqns)):
            return jex.ClosedJaxpr(jaxpr, program.consts)
        jaxpr, used = jaxpr.replace(eqns=eqns), (True,) * len(jaxpr.outvars)


def _underived(jaxpr: jex.Jaxpr) -> jex.Jaxpr:
    """A program without what is there for derivatives alone.

    Equations that hand on a value, and tell JAX of its tangent, are left out. Loops are
    given zeros for what they do not read.
    """
    same, eqns = dict[jex.Var, jax.core.Atom](), list[jex.JaxprEqn]()
    now = lambda x: renamed(x, same)
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=list(map(now, eqn.invars)))
        if is_through(eqn):
            same[eqn.outvars[0]] = eqn.invars[-1]
        else:
            eqns += _given_zeros(eqn)
    return jaxpr.replace(eqns=eqns, outvars=list(map(now, jaxpr.outvars)))


def _given_zeros(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """An equation that is given zeros for what it does not read, behind their own."""
    formula = formula_of(eqn)
    if formula is None or all(formula.reads):
        return [eqn]
    made, ins = list[jex.JaxprEqn](), list[jax.core.Atom]()
    for x, is_read in zip(eqn.invars, formula.reads, strict=True):
        if not is_read:
            zeros = jax.make_jaxpr(functools.partial(zero_array, x.aval))().jaxpr
            made += zeros.eqns
            (x,) = zeros.outvars
        ins.append(x)
    return [*made, eqn.replace(invars=ins)]


def _leaner(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """The equations of a program, with loops that give only what is needed."""
    needed, eqns = set(filter(_is_variable, jaxpr.outvars)), list[jex.JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if (formula := formula_of(eqn)) is not None:
            found = formula.leaner(tuple(var in needed for var in eqn.outvars))
            if found is not None:
                formula, takes, gives = found
                ins, outs = pick(eqn.invars, takes), pick(eqn.outvars, gives)
                eqn = eqn.replace(params={"_prim": formula}, invars=ins, outvars=outs)
        eqns.append(eqn)
        needed.update(filter(_is_variable, eqn.invars))
    return eqns[::-1]


def _is_variable(atom: jax.core.Atom) -> bool:
    return isinstance(atom, jex.Var)
