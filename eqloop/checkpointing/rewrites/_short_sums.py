"""Writes short products in the step of a batch as sums.

Each stage of a Runge-Kutta method adds up the slopes of the stages before it, which are
the rows of a buffer, with the weights of its tableau:

    one example    "r, rd -> d"      a product of a vector and a matrix
    a batch        "r, brd -> bd"    the rows `r` are now the middle axis

XLA's CPU backend multiplies only along the first or the last axis of a matrix. So it
would transpose the whole buffer at each stage, which takes longer than everything else
in the step. A sum over the middle axis reads the buffer as it is.

It gains: without, the gradient of a batch of solves takes 1.4 to 2.2 times as long.
"""

import functools

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import is_symbolic
from ..._programs import (
    Rewrite,
    aval_of,
    calling,
    map_programs,
    rewrite_everywhere,
    with_equations,
)
from ..._types import Value

# What a plan says of it.
NOTE = "short products in the batch become sums"

# The most terms of a sum. With more of them, a product is faster, copy included.
_MOST_TERMS = 16


def with_short_sums(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program without such products; the very same if it has none."""
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
    # A product of smaller floats is added up in a wider type; a sum would round first.
    dtypes = {aval.dtype for aval in (*avals, aval_of(eqn.outvars[0]))}
    if dtypes not in ({jnp.dtype("float32")}, {jnp.dtype("float64")}):
        return eqn
    for vector in (0, 1):
        axis = _middle_axis(eqn, vector)
        if axis is not None:
            # Traced as a call of the same operands: one equation in place of another.
            add = functools.partial(_weighed_sum, vector, axis)
            return calling(add, eqn.invars).replace(outvars=eqn.outvars)
    return eqn


def _middle_axis(eqn: jex.JaxprEqn, vector: int) -> int | None:
    """The axis over which a product adds up, if it is short and not at an end.

    `vector` is which of its operands may be a vector.
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
