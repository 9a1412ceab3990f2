"""Maxima over several axes, one axis after the other.

A range of rows ends with a sum over its rows, and with no maximum. But what is the
largest of each row has rows, and is small. So the last axis is left for later:

    max(x, (0, 1))  =  max(max(x, 1), 0)

Where several entries are the largest, a derivative of `jnp.max` is the mean of theirs.
So rows count as often as they have such entries.
"""

import functools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import is_inexact
from .._compat import form_of
from .._programs import Rewriter, aval_of, traced, with_equations
from .._types import PyTree, Value
from ._written import flattened

_KINDS = {"reduce_max": jnp.max, "reduce_min": jnp.min}


def with_maxima_by_axis(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program whose maxima over several axes leave the longest of them for later."""
    rewriter = Rewriter(program)
    for eqn in map(rewriter.enter, program.jaxpr.eqns):
        if not _is_long(eqn):
            rewriter.eqns.append(eqn)
            continue
        x = aval_of(eqn.invars[0])
        f = functools.partial(_by_axis, form_of(eqn), tuple(eqn.params["axes"]))
        two = flattened(traced(lambda x, f=f: [f(x)], [x]))
        eqns = [e.replace(source_info=eqn.source_info) for e in two.jaxpr.eqns]
        rewriter.inline(with_equations(two, eqns), eqn.invars, eqn.outvars)
    return rewriter.result()


def _is_long(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a maximum over several axes that have several entries."""
    if form_of(eqn) not in _KINDS:
        return False
    x = aval_of(eqn.invars[0])
    return is_inexact(x) and sum(x.shape[i] > 1 for i in eqn.params["axes"]) > 1


def _by_axis(form: str, axes: tuple[int, ...], x: Value) -> Value:
    last = max(axes, key=lambda i: x.shape[i])
    others = tuple(i for i in axes if i != last)
    rows = _KINDS[form](x, others)
    is_it = x == lax.stop_gradient(jnp.expand_dims(rows, others))
    count = jnp.sum(is_it, others, dtype=jnp.float32)
    return _over_rows(form, last - sum(i < last for i in others), rows, count)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _over_rows(form: str, axis: int, rows: Value, count: Value) -> Value:
    return _KINDS[form](rows, axis)


@_over_rows.defjvp
def _(form: str, axis: int, primals: PyTree, tangents: PyTree) -> tuple[Value, Value]:
    (rows, count), (dots, _) = primals, tangents
    found = _over_rows(form, axis, rows, count)
    wide = max(dots.dtype, count.dtype, key=lambda dtype: dtype.itemsize)
    is_it = rows == jnp.expand_dims(found, axis)
    weights = jnp.where(is_it, count.astype(wide), 0)
    shares = jnp.where(is_it, weights * dots.astype(wide), 0)
    dot = jnp.sum(shares, axis) / jnp.sum(weights, axis)
    return found, dot.astype(dots.dtype)
