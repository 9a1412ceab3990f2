"""Removes from a program what its outputs do not need, and that within loops as well.

JAX's dead code elimination looks into a `scan`, but not into the primitives of this
library: if one output of a loop is needed, all of its inputs are. Take a step with an
inner loop that writes rows, and a counter beside them. If the counter is needed, all
rows would be, too, and every slot would have to hold them.
"""

import functools

import jax
import jax.core
import jax.extend.core as jex

from ..._arrays import Flags, pick, zero_array
from ..._compat import is_through
from ..._programs import (
    formula_of,
    pruned,
    renamed,
    with_equations,
    with_formula,
    with_parts,
)
from ._step import Step


@functools.lru_cache(maxsize=512)
def dce(program: jex.ClosedJaxpr, used: Flags) -> jex.ClosedJaxpr:
    """A program with the same inputs, and with only those outputs that are used.

    It must not be differentiated, since a derivative may read more.
    """
    program = pruned(_underived(program), used)
    # A loop with fewer outputs reads fewer inputs. So equations before it may be dead,
    # and then outputs of loops among these.
    # Each round takes outputs from loops and adds none, so this comes to an end.
    while True:
        eqns = _with_dead_outputs_removed(program.jaxpr)
        if (fewer := with_equations(program, eqns)) is program:
            return program
        program = pruned(fewer)


@functools.lru_cache(maxsize=128)
def dce_step(step: Step) -> Step:
    """A step of the same meaning without what is there for derivatives alone."""
    used = (True,) * len(step.jaxpr.out_avals)
    return step.rewritten(lambda program: dce(program, used))


def _underived(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program without what is only there for derivatives."""
    same, eqns = dict[jex.Var, jax.core.Atom](), list[jex.JaxprEqn]()
    now = lambda x: renamed(x, same)
    for eqn in program.eqns:
        eqn = eqn.replace(invars=list(map(now, eqn.invars)))
        # Such an equation returns its operand, and only tells JAX whether that has a
        # tangent (`with_symbolic_zeros`).
        if is_through(eqn):
            same[eqn.outvars[0]] = eqn.invars[-1]
        else:
            # Loops get zeros for inputs that matter only to their derivatives
            # (`Formula.reads`).
            eqns += _given_zeros(eqn)
    outvars = list(map(now, program.jaxpr.outvars))
    return with_parts(program, eqns=eqns, outvars=outvars)


def _given_zeros(eqn: jex.JaxprEqn) -> list[jex.JaxprEqn]:
    """An equation with zeros for inputs that it does not read, after these zeros."""
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


def _with_dead_outputs_removed(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    """The equations of a program, in which loops have only outputs that are needed."""
    needed, eqns = set(filter(_is_variable, jaxpr.outvars)), list[jex.JaxprEqn]()
    # From the end, as all readers of a variable come after the equation that makes it.
    # Equations that nothing reads stay here; the caller prunes them.
    for eqn in reversed(jaxpr.eqns):
        if (formula := formula_of(eqn)) is not None:
            smaller = formula.keep_outputs(tuple(var in needed for var in eqn.outvars))
            if smaller is not None:
                formula, takes, gives = smaller
                ins, outs = pick(eqn.invars, takes), pick(eqn.outvars, gives)
                eqn = with_formula(eqn, formula).replace(invars=ins, outvars=outs)
        eqns.append(eqn)
        needed.update(filter(_is_variable, eqn.invars))
    return eqns[::-1]


def _is_variable(atom: jax.core.Atom) -> bool:
    return isinstance(atom, jex.Var)
