"""The equations that read rows of a buffer, and those that write some.

JAX writes rows in two ways. Both return their first operand with some rows replaced:

    dynamic_update_slice(buffer, rows, i, j)    out of bounds, rows are moved into it
    scatter(buffer, [i, j], rows)               out of bounds, rows are dropped, mostly

A `RowWrite` says of either which operands are what.
"""

from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax import lax

from ._equations import aval_of

# Equations that read rows of their first operand.
READS = frozenset({"dynamic_slice", "gather", "slice"})
# Equations that return their first operand with some rows replaced or added to.
WRITES = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})


class RowWrite(NamedTuple):
    """How an equation writes to its first operand.

    Attributes:
        place: Which operand has the rows.
        at: The operands that say where they go: a number for each axis, or an array
            of numbers (and of several such, one after the other).
        axes: The axis of the buffer that each of these numbers is for.
        sizes: The size of the block that is written, along each axis of the buffer.
        is_clamped: Whether a block out of bounds is moved into the buffer. Otherwise it
            is dropped.
        can_be_dropped: Whether it can be moved out of bounds, and is dropped there by a
            scatter. Without an index, as in `rows.at[:].add(h)`, it cannot.
    """

    place: int
    at: tuple[jax.core.Atom, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    is_clamped: bool
    can_be_dropped: bool


def row_write(eqn: jex.JaxprEqn) -> RowWrite | None:
    """What an equation writes, if it is one of `WRITES`."""
    if eqn.primitive.name not in WRITES:
        return None
    ndim = aval_of(eqn.invars[0]).ndim
    if eqn.primitive.name == "dynamic_update_slice":
        sizes = aval_of(eqn.invars[1]).shape
        axes = tuple(range(ndim))
        return RowWrite(1, tuple(eqn.invars[2:]), axes, sizes, True, ndim > 0)
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[2]).shape
    # The update lacks the axes along which a block has a single entry.
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter([shape[axis] for axis in numbers.update_window_dims])
    sizes = tuple(1 if axis in single else next(window) for axis in range(ndim))
    axes = tuple(map(int, numbers.scatter_dims_to_operand_dims))
    is_clamped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    can_be_dropped = bool(axes) and not is_clamped
    return RowWrite(2, (eqn.invars[1],), axes, sizes, is_clamped, can_be_dropped)


def makes_zeros(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation makes an array of zeros, to add or to write rows to."""
    number = eqn.invars[0] if eqn.primitive.name == "broadcast_in_dim" else None
    return isinstance(number, jex.Literal) and not np.any(number.val)
