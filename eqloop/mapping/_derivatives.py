"""The derivatives of a function of rows, and the function under `vmap`.

All are functions of rows again. A row that is in two chunks must count once. It will
not do to leave out the cotangent of one of the two, as zero times an infinite
derivative is not a number: where a row is given the same value twice, each of the two
gets half of the cotangent, and from there on, what is linear in it adds up.
"""

import dataclasses
import functools
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from .._partition import Flags, pick, split
from .._programs import (
    along_axis,
    batched,
    batched_axes,
    batched_types,
    has_rules,
    joined,
    pulled,
    pushed,
    run,
    settled,
    traced,
)
from .._tangents import cotangent_types, tangent_types
from ..progress import Again
from ._rows import Rows, along, visits_type

# For the consts and the xs, or for the sums and the ys.
Marks = tuple[Flags, Flags]


@functools.lru_cache(maxsize=128)
def pushed_rows(rows: Rows, moves: Marks, out: Marks) -> Rows:
    """The outputs, and the tangents of some of them, from inputs and their tangents."""

    def push(_: Rows, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        program = rows.program(size, has_visits)
        return pushed(program, rows.marks(has_visits, *moves), out)

    twofold = lambda entries, flags: (*entries, *pick(entries, flags))
    return dataclasses.replace(
        rows,
        f=push,
        const_types=(*rows.const_types, *tangent_types(rows.const_types, moves[0])),
        x_types=(*rows.x_types, *tangent_types(rows.x_types, moves[1])),
        x_axes=twofold(rows.x_axes, moves[1]),
        y_axes=twofold(rows.y_axes, out[1]),
        shares=twofold(rows.shares, out[1]),
        num_sums=rows.num_sums + sum(out[0]),
        meter=rows.meter.tangents,
    )


@functools.lru_cache(maxsize=128)
def pulled_rows(rows: Rows, marks: Marks, wanted: Marks) -> Rows:
    """The cotangents of marked inputs, from the inputs and cotangents of outputs."""
    axes, shares = pick(rows.y_axes, wanted[1]), pick(rows.shares, wanted[1])
    again = rows.with_bars(Again())

    def pull(_: Rows, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        moves = again.marks(has_visits, *marks)
        program = pulled(again.program(size, has_visits), moves, wanted)
        if not has_visits:
            return program
        num_visits = again.num_visits(has_visits)

        def halve(visits: Any, *flat: Any) -> list[Any]:
            before, ct_ys = split(flat, len(flat) - len(axes))
            ct_ys = [
                ct if share else halved(ct, visits, axis)
                for ct, share, axis in zip(ct_ys, shares, axes, strict=True)
            ]
            return run(program, *[visits] * num_visits, *before, *ct_ys)

        return traced(halve, [visits_type(size), *program.in_avals[num_visits:]])

    y_axes = tuple(pick(rows.x_axes, marks[1]))
    return dataclasses.replace(
        rows,
        f=pull,
        const_types=(*rows.const_types, *cotangent_types(rows.out_types[0], wanted[0])),
        x_types=(*rows.x_types, *cotangent_types(rows.y_types, wanted[1])),
        x_axes=(*rows.x_axes, *axes),
        y_axes=y_axes,
        shares=(True,) * len(y_axes),
        num_sums=sum(marks[0]),
        uses_visits=True,
        meter=rows.meter.backward,
        changes=(),
    )


@functools.lru_cache(maxsize=128)
def settled_rows(rows: Rows, marks: Marks, reverse: bool) -> Rows:
    """What is left of the function when it has been differentiated, see `settled`."""
    if not has_rules(rows.program(*rows.probe)):
        return rows

    def settle(_: Rows, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        flags = joined(rows.marks(has_visits, *marks))
        return settled(rows.program(size, has_visits), flags, reverse)

    return dataclasses.replace(rows, f=settle)


@functools.lru_cache(maxsize=128)
def batched_rows(rows: Rows, axis_data: Any, dims: Any) -> tuple[Rows, Marks]:
    """The function under `vmap`, with which outputs it batches: along their first axis.

    To batch what is done to a chunk, and not the loop over them, leaves one accumulator
    to the cotangent of an unbatched const. Inputs stay as they lie.
    """
    const_dims, x_dims = map(tuple, dims)
    is_batched = [[dim is not None for dim in group] for group in dims]
    marks = rows.reached(*is_batched, axis_name=axis_data.name)

    def batch(_: Rows, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        of_visits = [None] * rows.num_visits(has_visits)
        in_dims, out_dims = (*of_visits, *const_dims, *x_dims), in_front(joined(marks))
        # Nobody has traced chunks of this size before, and rows may use the axis.
        program = along_axis(lambda: rows.program(size, has_visits), axis_data)
        return batched(program, axis_data, in_dims, tuple(out_dims))

    x_axes, of_row = batched_axes(rows.x_axes, x_dims)
    size = axis_data.size
    grown_rows = dataclasses.replace(
        rows,
        f=batch,
        const_types=tuple(batched_types(rows.const_types, const_dims, size)),
        x_types=tuple(batched_types(rows.x_types, of_row, size)),
        x_axes=x_axes,
        y_axes=tuple(map(int.__add__, rows.y_axes, map(int, marks[1]))),
    )
    return grown_rows, marks


def halved(y: Any, visits: Any, axis: int) -> Any:
    """Rows, and half of those that are in two chunks."""
    return jnp.where(along(visits > 0, axis, y), y / 2, y)


def in_front(flags: Flags) -> list[int | None]:
    """Where outputs are batched."""
    return [0 if flag else None for flag in flags]
