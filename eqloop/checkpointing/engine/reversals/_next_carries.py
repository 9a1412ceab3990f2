"""Leaves of the next carry, which is known when steps are linearised in a batch.

The batch has the carry before each step, and so the carry after each of them, which is
the one before the next step. The derivative of some functions, such as `tanh`, is
computed from their result. If that is a leaf of the next carry, nothing needs to be
computed on the way to it:

    step          h -> z = W h  -> h1 = tanh(z)
    given h1      h, h1 given as an `x`           dh1 = (1 - h1^2) dz,  dz = W dh + dW h

So linearising a plain recurrent cell does not multiply. Where steps are run again for a
single batch, their products are kept instead (`_known_products.py`): that takes as much
memory, as XLA would copy the carries from between the others.

It gains: without, a plain recurrent cell whose carries are all stored takes 1.2 times
as long on a CPU.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex

from ...._arrays import is_inexact
from ...._programs import aval_of, inputs_read, program_from, run, traced, with_parts
from ...._types import Value
from .._step import Step
from ._known_products import with_given_result


@functools.lru_cache(maxsize=128)
def given_leaves(step: Step) -> tuple[tuple[int, ...], Step]:
    """A step that is given some leaves of the carry after it.

    Returns:
        Those leaves whose derivative is computed from their own values, and the step
        that is given these behind `x`.
    """
    jaxpr = step.jaxpr.jaxpr
    at = {eqn.outvars[0]: i for i, eqn in enumerate(jaxpr.eqns)}
    eqns, values = list(jaxpr.eqns), dict[int, jex.Var]()
    for leaf, var in enumerate(jaxpr.outvars[: step.num_carry]):
        # A second leaf that is the same variable has the same value.
        place = at.pop(var, None) if isinstance(var, jex.Var) else None
        if place is None or (found := _known_result(eqns[place])) is None:
            continue
        eqns[place], values[leaf] = found
    invars = [*jaxpr.invars, *values.values()]
    program = with_parts(step.jaxpr, invars=invars, eqns=eqns)
    return tuple(values), dataclasses.replace(step, jaxpr=program)


def _known_result(eqn: jex.JaxprEqn) -> tuple[jex.JaxprEqn, jex.Var] | None:
    """An equation that is given its result, if its derivative reads nothing else."""
    inputs = [var for var in eqn.invars if isinstance(var, jex.Var)]
    types = [aval_of(var) for var in (*inputs, *eqn.outvars)]
    if len(inputs) != 1 or len(eqn.outvars) != 1 or not all(map(is_inexact, types)):
        return None
    own = program_from([eqn], inputs, eqn.outvars)
    of_input = lambda x: run(own, x)[0]
    pushed = traced(lambda x, dot: jax.jvp(of_input, (x,), (dot,)), [types[0]] * 2)
    # Its result becomes an input of this program, and is no longer computed.
    result, dot = pushed.jaxpr.outvars
    others = [eqn for eqn in pushed.jaxpr.eqns if eqn.outvars != [result]]
    # No equation has this result alone, so none can be left out.
    if len(others) == len(pushed.jaxpr.eqns):
        return None
    invars = [result, *pushed.jaxpr.invars]
    program = with_parts(pushed, invars=invars, eqns=others, outvars=[dot])
    # The tangent reads the input as well: that of `sin` is made from its `cos`.
    if inputs_read(program, [True])[1]:
        return None

    def push(
        primals: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[Value, Value]:
        (value, x), (_, dot) = primals, tangents
        return value, run(program, value, x, dot)[0]

    return with_given_result(eqn, inputs, push)
