"""Writes of several rows that read the buffer they write to, without writing in place.

A delay line moves all of its rows by one:

    rows.at[1:].set(rows[:-1])

On the CPU, XLA may run that in place, and then reads rows that it has written before
(xla #49176). It does so where the result is a row of a stack that is written in the
same kernel: in plain JAX for loops of a single step, and in the gradients of planned
loops for steps whose carry is stored. Here the new rows are written elsewhere, and then
selected:

    where(zeros.at[1:].set(True), zeros.at[1:].set(rows[:-1]), rows)

A write of a single row is not changed: it does not overwrite what it has yet to read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._compat import misreads_shifted_writes
from .._types import Value
from ._equations import Rewrite, aval_of, computed_from
from ._jaxprs import map_programs, rewrite_everywhere, with_equations
from ._row_writes import row_write


def without_shifted_writes(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The program without such writes; the very same object if there are none."""
    return _rewritten(program) if misreads_shifted_writes() else program


@functools.lru_cache(maxsize=512)
def _rewritten(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    return rewrite_everywhere(_written_elsewhere, program)


def _written_elsewhere(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
    eqns = [map_programs(eqn, rewrite) for eqn in program.eqns]
    return with_equations(
        program,
        [
            _selecting(eqn) if _is_shifted(eqn, eqns[:i]) else eqn
            for i, eqn in enumerate(eqns)
        ],
    )


def _is_shifted(eqn: jex.JaxprEqn, before: Sequence[jex.JaxprEqn]) -> bool:
    """Whether an equation writes several rows that are computed from its operand."""
    write = row_write(eqn)
    if write is None or eqn.primitive.name == "scatter-add":
        return False
    operand, update = eqn.invars[0], eqn.invars[write.place]
    if not (isinstance(operand, jex.Var) and isinstance(update, jex.Var)):
        return False
    # More than one row along an axis that they do not fill.
    sizes = zip(write.sizes, aval_of(operand).shape, strict=True)
    writes_several = any(1 < size < most for size, most in sizes)
    return writes_several and operand in computed_from(before, [update])


def _selecting(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """The same write as a call, which writes elsewhere."""
    made = row_write(eqn)
    assert made is not None
    at = made.place
    write = functools.partial(eqn.primitive.bind, **eqn.params)

    def shifted_write(*inputs: Value) -> Value:
        operand, update = inputs[0], inputs[at]
        of_flags = [*inputs]
        of_flags[0] = jnp.zeros(operand.shape, bool)
        of_flags[at] = jnp.ones(update.shape, bool)
        is_new = write(*of_flags)
        return jnp.where(is_new, write(jnp.zeros_like(operand), *inputs[1:]), operand)

    run = jax.make_jaxpr(jax.jit(shifted_write))
    (call,) = run(*map(aval_of, eqn.invars)).eqns
    return eqn.replace(
        primitive=call.primitive, params=call.params, effects=call.effects
    )
