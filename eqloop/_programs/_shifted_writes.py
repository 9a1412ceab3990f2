"""Writes of several rows that read the buffer they write to, without writing in place.

A delay line moves all of its rows by one:

    rows.at[1:].set(rows[:-1])

On the CPU, XLA may run that in place, and then reads rows that it has written before
(xla #49176). It does so where the result is a row of a stack that is written in the
same kernel: in plain JAX for loops of a single step, and in the gradients of planned
loops for steps whose carry is stored. Here the buffer is put together anew:

    concatenate([rows[:1], rows[:-1]])

If it is not known before where rows are written, or if these are no whole rows, they
are written elsewhere, and then selected:

    where(zeros.at[i:].set(True), zeros.at[i:].set(rows[:-1]), rows)

A write of a single row is not changed: it does not overwrite what it has yet to read.
"""

import functools
from collections.abc import Sequence

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import misreads_shifted_writes
from .._types import Value
from ._equations import Rewrite, aval_of, computed_from
from ._jaxprs import calling, map_programs, rewrite_everywhere, with_equations
from ._row_writes import RowWrite, row_write


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
            _elsewhere(eqn, eqns[:i]) if _is_shifted(eqn, eqns[:i]) else eqn
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


def _elsewhere(eqn: jex.JaxprEqn, before: Sequence[jex.JaxprEqn]) -> jex.JaxprEqn:
    """A write as a call with the same result, which writes elsewhere."""
    made = row_write(eqn)
    assert made is not None
    at, place = made.place, _place(eqn, made, before)
    write = functools.partial(eqn.primitive.bind, **eqn.params)

    def shifted_write(*inputs: Value) -> Value:
        operand, update = inputs[0], inputs[at]
        if place is not None:
            axis, first = place
            last, rows = first + made.sizes[axis], operand.shape[axis]
            ends = (0, first), (last, rows)
            start, end = (lax.slice_in_dim(operand, *e, axis=axis) for e in ends)
            return lax.concatenate([start, update, end], axis)
        of_flags = [*inputs]
        of_flags[0] = jnp.zeros(operand.shape, bool)
        of_flags[at] = jnp.ones(update.shape, bool)
        is_new = write(*of_flags)
        return jnp.where(is_new, write(jnp.zeros_like(operand), *inputs[1:]), operand)

    call = calling(shifted_write, eqn.invars)
    return eqn.replace(
        primitive=call.primitive, params=call.params, effects=call.effects
    )


def _place(
    eqn: jex.JaxprEqn, write: RowWrite, before: Sequence[jex.JaxprEqn]
) -> tuple[int, int] | None:
    """The axis and the first of the rows, if these are whole and it is known."""
    shape, sizes = aval_of(eqn.invars[0]).shape, write.sizes
    pairs = zip(sizes, shape, strict=True)
    axes = [axis for axis, (size, most) in enumerate(pairs) if size != most]
    if len(axes) != 1 or aval_of(eqn.invars[write.place]).shape != sizes:
        return None
    (axis,), numbers = axes, [_number(x, before) for x in write.at]
    if len(numbers) != len(write.axes):
        return None
    starts = dict(zip(write.axes, numbers, strict=True))
    first = starts.pop(axis, None)
    if first is None or set(starts.values()) - {0}:
        return None
    return (axis, first) if 0 <= first <= shape[axis] - sizes[axis] else None


def _number(atom: jax.core.Atom, before: Sequence[jex.JaxprEqn]) -> int | None:
    """The number that an atom is, or that an array of a single one holds."""
    if isinstance(atom, jex.Literal):
        return int(atom.val) if np.size(atom.val) == 1 else None
    for eqn in before:
        is_same = eqn.primitive.name in ("broadcast_in_dim", "reshape")
        if atom in eqn.outvars and is_same and aval_of(atom).shape == (1,):
            return _number(eqn.invars[0], before)
    return None
