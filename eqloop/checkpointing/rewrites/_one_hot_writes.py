"""Writes a row that a step selects by its number as a write of that row.

A delay line may be written without an index, by a mask that is true for one row:

    where((arange(n) == i)[:, None], row, line)    becomes    line.at[i].set(row)

The mask takes time in proportion to the whole line at every step, and hides that a
single row is written. So slots would hold the line, see `steps/_row_lists.py`.

It gains: without, such a line of 500 rows takes 40 times as long on a CPU, and 6 times
the memory in a loop of 2,000 steps.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import Flags, explicit_sharding, is_symbolic
from ..._programs import aval_of, calling, equations, inlined, pruned, with_equations
from ..._types import Value
from ..steps._step import Step

_SPREADS = ("broadcast_in_dim", "convert_element_type")
_NUMBERS = lax.ScatterDimensionNumbers
# The axes of a whole array that those of a mask are; `None` for one that is spread.
_Axes = tuple[int | None, ...]

# What a plan says of it, and of a leaf where a mask stands in the way.
NOTE = "one-hot write of {} becomes a write of one row"
BLENDED = "a mask blends all of it; `jnp.where(mask, new, old)` would write one row"


def with_row_writes(step: Step) -> tuple[Step, Flags]:
    """A step with writes of rows in its carry, and to which leaves it now writes them.

    The very same if nothing is selected.
    """
    nowhere = (False,) * step.num_carry
    names = {eqn.primitive.name for eqn in equations(step.jaxpr)}
    if not names >= {"select_n", "iota"} or names.isdisjoint({"eq", "ne"}):
        return step, nowhere
    program, made_by, buffers = _opened(step)
    writes = [_write_for(eqn, made_by, buffers) for eqn in program.eqns]
    if not any(writes):
        return step, nowhere
    eqns = [new or eqn for new, eqn in zip(writes, program.eqns, strict=True)]
    new = pruned(inlined(with_equations(program, eqns)))
    written = {write.invars[0] for write in writes if write}
    return step.rewritten(lambda _: new), tuple(b in written for b in buffers)


@functools.lru_cache(maxsize=128)
def blended_leaves(step: Step) -> Flags:
    """The leaves of a carry that a step blends with something by a mask of one row.

    As in `(1 - mask) * leaf + mask * row`. If rows are not finite, no write does that.
    """
    program, made_by, buffers = _opened(step)

    def is_blended(leaf: jex.Var, after: jax.core.Atom) -> bool:
        terms, factors, left = set[Any](), set[Any](), [after]
        while left:
            eqn = _maker(left.pop(), made_by)
            if eqn is not None and eqn.primitive.name in ("add", "mul", "sub"):
                new = {x for x in eqn.invars if isinstance(x, jex.Var)}
                factors |= new if eqn.primitive.name == "mul" else set()
                left += new - terms
                terms |= new
        if leaf not in terms:
            return False
        axes = tuple(range(aval_of(leaf).ndim))
        return any(_is_made_of_mask(factor, made_by, axes) for factor in factors)

    return tuple(map(is_blended, buffers, program.jaxpr.outvars))


def _is_made_of_mask(
    atom: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn], axes: _Axes
) -> bool:
    """Whether a factor is a mask of one row, as numbers, or all but that."""
    eqn = _maker(atom, made_by)
    if eqn is None:
        return False
    if eqn.primitive.name in (*_SPREADS, "sub", "not"):
        return _is_made_of_mask(eqn.invars[-1], made_by, _axes_of_operand(eqn, axes))
    if eqn.primitive.name not in ("eq", "ne"):
        return False
    one, other = eqn.invars
    return any(
        _axis_of_numbers(row, made_by, axes) is not None and _is_one(at, made_by)
        for row, at in ((one, other), (other, one))
    )


def _is_one(atom: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn]) -> bool:
    """Whether an array is a single number, spread over its entries."""
    eqn = _maker(atom, made_by)
    if aval_of(atom).size == 1 or eqn is None or eqn.primitive.name not in _SPREADS:
        return aval_of(atom).size == 1
    return _is_one(eqn.invars[0], made_by)


def _maker(
    atom: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn]
) -> jex.JaxprEqn | None:
    return made_by.get(atom) if isinstance(atom, jex.Var) else None


def _opened(
    step: Step,
) -> tuple[jex.ClosedJaxpr, dict[jex.Var, jex.JaxprEqn], list[jex.Var]]:
    """The program of a step, without calls; what makes its variables; and its carry."""
    program = inlined(step.jaxpr)
    made_by = {out: eqn for eqn in program.eqns for out in eqn.outvars}
    return program, made_by, program.jaxpr.invars[step.num_consts :][: step.num_carry]


def _write_for(
    eqn: jex.JaxprEqn, made_by: Mapping[jex.Var, jex.JaxprEqn], buffers: list[jex.Var]
) -> jex.JaxprEqn | None:
    """A write of a row that does the same as an equation, if it selects one.

    `buffers` are the arrays to which rows are written.
    """
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    aval = aval_of(eqn.outvars[0])
    if any(map(is_symbolic, aval.shape)) or explicit_sharding(aval) is not None:
        return None
    mask, *cases = eqn.invars
    if (found := _row_of_mask(mask, made_by, tuple(range(aval.ndim)))) is None:
        return None
    axis, at, is_true_there = found
    buffer, new = cases if is_true_there else reversed(cases)
    spread = _maker(new, made_by)
    if not any(buffer is each for each in buffers) or spread is None:
        return None
    # The new rows are all alike.
    dims = spread.params.get("broadcast_dimensions", ())
    if spread.primitive.name != "broadcast_in_dim" or axis in dims:
        return None
    (row,) = spread.invars
    shape = tuple(size for i, size in enumerate(aval.shape) if i != axis)
    dims = tuple(i - (i > axis) for i in dims)

    def row_write(buffer: Value, at: Value, row: Value) -> Value:
        row = lax.broadcast_in_dim(row, shape, dims)
        numbers = _NUMBERS(tuple(range(len(shape))), (axis,), (axis,))
        return lax.scatter(
            buffer,
            at.reshape(1),
            row,
            numbers,
            indices_are_sorted=True,
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )

    return calling(row_write, [buffer, at, row]).replace(outvars=eqn.outvars)


def _row_of_mask(
    mask: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn], axes: _Axes
) -> tuple[int, jax.core.Atom, bool] | None:
    """The axis along which a mask singles out a row, its number, and the value there.

    `made_by` has the equations that make variables; for `axes` see `_Axes`.
    """
    eqn = _maker(mask, made_by)
    if eqn is None:
        return None
    name, axes_of_operand = eqn.primitive.name, _axes_of_operand(eqn, axes)
    if name == "broadcast_in_dim":
        return _row_of_mask(eqn.invars[0], made_by, axes_of_operand)
    if name not in ("eq", "ne"):
        return None
    for row, at in (eqn.invars, reversed(eqn.invars)):
        axis = _axis_of_numbers(row, made_by, axes)
        if axis is not None and (number := _single(at, made_by)) is not None:
            return axis, number, name == "eq"
    return None


def _axis_of_numbers(
    atom: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn], axes: _Axes
) -> int | None:
    """The axis along which an array has the numbers of its rows."""
    eqn, aval = _maker(atom, made_by), aval_of(atom)
    is_wide = jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize >= 4
    if eqn is None or not is_wide:
        return None
    if eqn.primitive.name == "iota":
        return axes[eqn.params["dimension"]]
    if eqn.primitive.name in _SPREADS:
        axes = _axes_of_operand(eqn, axes)
        return _axis_of_numbers(eqn.invars[0], made_by, axes)
    return None


def _axes_of_operand(eqn: jex.JaxprEqn, axes: _Axes) -> _Axes:
    dims = eqn.params.get("broadcast_dimensions")
    if dims is None:
        return axes
    sizes = zip(dims, aval_of(eqn.invars[0]).shape, strict=True)
    # What is one entry of the operand for all rows numbers none of these.
    shape = eqn.params["shape"]
    return tuple(axes[i] if shape[i] == size else None for i, size in sizes)


def _single(
    atom: jax.core.Atom, made_by: Mapping[jex.Var, jex.JaxprEqn]
) -> jax.core.Atom | None:
    """The number that all entries of an array are, as an atom without axes."""
    aval = aval_of(atom)
    is_wide = jnp.issubdtype(aval.dtype, jnp.integer) and aval.dtype.itemsize >= 4
    if not is_wide:
        return None
    if not aval.shape:
        return atom
    eqn = _maker(atom, made_by)
    if eqn is None or eqn.primitive.name != "broadcast_in_dim":
        return None
    return _single(eqn.invars[0], made_by)
