"""Products that are known when a step is linearised, since it has been run before.

Steps that are reversed together have just been run one after the other, to find their
carries. Most of the time of most steps goes into products of matrices, whose values are
small. So these values are kept for the batch, and linearising does not multiply again:

    step          h -> z = W h          -> tanh(z)
    known z       h, z given as an `x`  -> tanh(z)      dz = W dh + dW h, as before

The step is given the values behind its `x`. Their derivatives are computed from the
factors, as if the product had been evaluated.

It gains: without, a plain recurrent cell takes 1.15 times as long on a CPU.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
from jax.custom_derivatives import SymbolicZero

from ...._arrays import is_symbolic, nbytes, pick, put
from ...._programs import (
    aval_of,
    inputs_read,
    program_from,
    pruned,
    run,
    with_parts,
)
from ...._types import Aval, Value
from ...steps._step import Step
from .._backward_step import Back, BackwardStep

# Products that add up fewer terms are not kept: they are quickly computed again.
_LEAST_TERMS = 16
# Operations that may combine several products into one value that is no larger. Then
# that value is kept instead.
_LINEAR = frozenset({"add", "sub", "transpose", "reshape"})

# Values, each with the equations that compute it.
Groups = dict[jax.core.Atom, list[jex.JaxprEqn]]


class Products(NamedTuple):
    """The products of a step.

    Attributes:
        program: From consts, carry and `x` to their values.
        back: The backward step of the step that is given these values behind its `x`.
    """

    program: jex.ClosedJaxpr
    back: BackwardStep

    @property
    def types(self) -> list[Aval]:
        """The types of the values."""
        return list(self.program.out_avals)


@functools.lru_cache(maxsize=128)
def products_of(back: BackwardStep) -> Products | None:
    """The products of a step that are worth keeping, if there are any."""
    step = back.step
    groups = groups_of(step) if back.takes_blocks else {}
    if not groups:
        return None
    if back.changes:
        found = products_of(dataclasses.replace(back, changes=()))
        if found is None:
            return None
        counts = step.num_consts, step.num_carry, len(step.x_types), 0
        program = back.of(Back(found.program, counts)).program
        return Products(program, dataclasses.replace(found.back, changes=back.changes))
    given = _given(back, groups)
    program = given.one.program
    read = inputs_read(program, [True] * len(program.out_avals))
    # The reversal need not read all of them: a product that is only added to an output
    # has no influence on any derivative.
    used = read[len(step.jaxpr.in_avals) :][: len(groups)]
    if not all(used):
        groups = dict(pick(list(groups.items()), used))
        given = _given(back, groups)
    bare = pruned(with_parts(step.jaxpr, outvars=groups))
    return Products(bare, given) if groups else None


def _given(back: BackwardStep, groups: Groups) -> BackwardStep:
    """A backward step that is given some products, behind `x`."""
    # The step without the equations of each group, in whose place is a single one.
    jaxpr = back.step.jaxpr.jaxpr
    within = {id(eqn) for group in groups.values() for eqn in group}
    eqns, values = list[jex.JaxprEqn](), list[jex.Var]()
    for eqn in jaxpr.eqns:
        group = groups.get(eqn.outvars[0])
        if group is not None:
            # It takes the place of the last equation, before which all factors are
            # known.
            eqn, value = _known_value(group)
            values.append(value)
        elif id(eqn) in within:
            continue  # nothing outside of its group reads this one, see `groups_of`
        eqns.append(eqn)
    given = with_parts(back.step.jaxpr, invars=[*jaxpr.invars, *values], eqns=eqns)
    step = dataclasses.replace(back.step, jaxpr=given)
    # The values behind `x` are not differentiated: the step takes derivatives through
    # what they are computed from.
    xs = (*back.active.xs, *[False] * len(values))
    active = back.active._replace(xs=xs)
    return dataclasses.replace(back, step=step, active=active)


def groups_of(step: Step) -> Groups:
    """The values that may be kept, in order, with the equations that compute each."""
    # A value is a product, or a linear combination of products that nothing else reads:
    # of `W h + U x`, the sum is kept, and not its two terms.
    jaxpr = step.jaxpr.jaxpr
    read = [var for eqn in jaxpr.eqns for var in eqn.invars] + list(jaxpr.outvars)
    times = Counter(var for var in read if isinstance(var, jex.Var))
    # The inputs that differ from step to step, and what depends on them.
    varies, groups = set(jaxpr.invars[step.num_consts :]), Groups()
    # A value so far that only one equation reads: it can become a part of that one's.
    is_free = lambda x: isinstance(x, jex.Var) and times[x] == 1 and x in groups
    for eqn in jaxpr.eqns:
        # What is the same at every step is computed once for a batch anyway.
        if varies.isdisjoint(v for v in eqn.invars if isinstance(v, jex.Var)):
            continue
        varies.update(eqn.outvars)
        out, name = eqn.outvars[0], eqn.primitive.name
        if name == "dot_general" and _has_many_terms(eqn):
            groups[out] = [eqn]
        elif (
            name in _LINEAR
            and all(map(is_free, eqn.invars))
            and nbytes([aval_of(out)]) <= nbytes(map(aval_of, eqn.invars))
        ):
            # The result stands for its terms from here on, and may become a term
            # itself.
            groups[out] = [e for var in eqn.invars for e in groups.pop(var)] + [eqn]
    return groups


def _has_many_terms(eqn: jex.JaxprEqn) -> bool:
    """Whether each entry of a product is a sum of many terms."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    sizes = [aval_of(eqn.invars[0]).shape[axis] for axis in contracted]
    return any(map(is_symbolic, sizes)) or math.prod(sizes) >= _LEAST_TERMS


def _known_value(group: list[jex.JaxprEqn]) -> tuple[jex.JaxprEqn, jex.Var]:
    """Replaces the equations that compute a value by one that is given it.

    It comes with the variable for the value, which the last of `group` computes.
    """
    # The new equation is a `custom_jvp` that returns its first operand, and whose rule
    # differentiates the equations.
    own = {eqn.outvars[0] for eqn in group}
    read = [v for eqn in group for v in eqn.invars if isinstance(v, jex.Var)]
    factors = list(dict.fromkeys(var for var in read if var not in own))
    program = program_from(group, factors, group[-1].outvars)

    @jax.custom_jvp
    def given(value: Value, *factors: Value) -> Value:
        return value

    def push(
        primals: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[Value, Value]:
        # The tangent of the given value is ignored. That of the product is computed for
        # factors that have a tangent: zeros for the others would be multiplied, too.
        (value, *factors), (_, *dots) = primals, tangents
        nonzeros = [not isinstance(dot, SymbolicZero) for dot in dots]
        of_moving = lambda *moving: run(program, *put(factors, nonzeros, moving))[0]
        _, dot = jax.jvp(of_moving, pick(factors, nonzeros), pick(dots, nonzeros))
        return value, dot

    given.defjvp(push, symbolic_zeros=True)
    # Traced, the equation has the form that this version of JAX gives it.
    (out,) = group[-1].outvars
    template = jax.make_jaxpr(given)(aval_of(out), *map(aval_of, factors)).jaxpr
    (found,), (value, *_) = template.eqns, template.invars
    place = group[-1].source_info
    return found.replace(
        invars=[value, *factors], outvars=[out], source_info=place
    ), value
