"""Products with a short vector in the step of a batch, written as sums.

Each stage of a Runge-Kutta method takes the slopes of the stages before it, which are
the rows of a buffer, and adds them up with the weights of its tableau: a product of a
vector and a matrix. `jax.vmap` puts the axis of the examples in front of the buffer, so
that its rows lie in the middle. A product on the CPU wants them at an end: XLA copies
all of the buffer into another order at each stage, which takes longer than all else
that the step does. A sum over the middle axis is computed where the rows lie.
"""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import is_symbolic
from ..._programs import (
    Rewrite,
    aval_of,
    called,
    map_programs,
    rewrite_everywhere,
    with_equations,
)
from ..._types import Value

# The most terms of a sum: of a long one, a product makes more than the copy costs.
_MOST_TERMS = 16


def with_short_sums(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program of the same meaning; the very same if it has no such product."""
    return rewrite_everywhere(_with_short_sums_within, program)


def _with_short_sums_within(
    program: jex.ClosedJaxpr, rewrite: Rewrite
) -> jex.ClosedJaxpr:
    eqns = [_as_sum(map_programs(eqn, rewrite)) for eqn in program.jaxpr.eqns]
    return with_equations(program, eqns)


def _as_sum(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """An equation, or a sum in place of such a product."""
    if eqn.primitive.name != "dot_general" or eqn.params["out_sharding"] is not None:
        return eqn
    avals = [aval_of(x) for x in eqn.invars]
    # Numbers of fewer bits would be rounded before they are added up.
    dtypes = {aval.dtype for aval in (*avals, aval_of(eqn.outvars[0]))}
    if dtypes not in ({jnp.dtype("float32")}, {jnp.dtype("float64")}):
        return eqn
    for vector in (0, 1):
        axis = _middle_axis(eqn, vector)
        if axis is not None:
            add = functools.partial(_weighed_sum, vector, axis)
            (call,) = called(jax.make_jaxpr(add)(*avals)).eqns
            return call.replace(invars=eqn.invars, outvars=eqn.outvars)
    return eqn


def _middle_axis(eqn: jex.JaxprEqn, vector: int) -> int | None:
    """The axis over which a product adds up, if it is short and not at an end.

    Args:
        eqn: The product.
        vector: Which of its operands may be a vector.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    one, other = (aval_of(eqn.invars[i]) for i in (vector, 1 - vector))
    if one.ndim != 1 or any(batch) or not contracted[vector]:
        return None
    (axis,), (length,) = contracted[1 - vector], one.shape
    is_short = not is_symbolic(length) and length <= _MOST_TERMS
    return axis if is_short and 0 < axis < other.ndim - 1 else None


def _weighed_sum(vector: int, axis: int, *factors: Value) -> Value:
    weights, terms = factors[vector], factors[1 - vector]
    return jnp.sum(lax.broadcast_in_dim(weights, terms.shape, (axis,)) * terms, axis)
