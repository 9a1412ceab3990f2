"""The derivatives of a function of rows, and the function under `vmap`.

All are functions of rows again. A row that is in two chunks must count once. It will
not do to leave out the cotangent of one of the two, as zero times an infinite
derivative is not a number: where a row is given the same value twice, each of the two
gets half of the cotangent, and from there on, what is linear in it adds up.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._formula import vmap
from .._partition import Arrays, Flags, pick, put, split
from .._settled import has_rules, settled
from .._tangents import instantiated
from ._rows import Rows, along

# For the consts and the xs, or for the sums and the ys.
Marks = tuple[Flags, Flags]


@functools.lru_cache(maxsize=128)
def pushed(rows: Rows, moves: Marks, out: Marks) -> Rows:
    """The outputs, and the tangents of some of them, from inputs and their tangents."""

    def push(
        size: int, visits: Any, consts: Arrays, xs: Arrays
    ) -> tuple[Arrays, Arrays]:
        chunk = rows.chunk(size, visits is not None)
        consts, consts_dot = split(consts, len(rows.const_types))
        xs, xs_dot = split(xs, len(rows.x_types))
        run = lambda *marked: chunk(visits, *map(put, (consts, xs), moves, marked))
        primals = tuple(map(pick, (consts, xs), moves))
        values, tangents = jax.jvp(run, primals, (consts_dot, xs_dot))
        sums, ys = map(_with, values, tangents, out)
        return sums, ys

    dots = lambda avals, flags: [a.to_tangent_aval() for a in pick(avals, flags)]
    twofold = lambda entries, flags: (*entries, *pick(entries, flags))
    return dataclasses.replace(
        rows,
        f=push,
        const_types=(*rows.const_types, *dots(rows.const_types, moves[0])),
        x_types=(*rows.x_types, *dots(rows.x_types, moves[1])),
        x_axes=twofold(rows.x_axes, moves[1]),
        y_axes=twofold(rows.y_axes, out[1]),
        shares=twofold(rows.shares, out[1]),
        meter=rows.meter and rows.meter.tangents,
    )


@functools.lru_cache(maxsize=128)
def pulled(rows: Rows, marks: Marks, wanted: Marks) -> Rows:
    """The cotangents of marked inputs, from the inputs and cotangents of outputs."""
    axes, shares = pick(rows.y_axes, wanted[1]), pick(rows.shares, wanted[1])
    again = rows.again(backward=False)

    def pull(
        size: int, visits: Any, consts: Arrays, xs: Arrays
    ) -> tuple[Arrays, Arrays]:
        chunk = again.chunk(size, visits is not None)
        consts, ct_sums = split(consts, len(rows.const_types))
        xs, ct_ys = split(xs, len(rows.x_types))

        def run(*marked: Arrays) -> Any:
            out = chunk(visits, *map(put, (consts, xs), marks, marked))
            return tuple(map(pick, out, wanted))

        _, back = jax.vjp(run, *map(pick, (consts, xs), marks))
        ct_ys = [
            ct if visits is None or share else halved(ct, visits, axis)
            for ct, share, axis in zip(ct_ys, shares, axes, strict=True)
        ]
        return back((ct_sums, ct_ys))

    cts = lambda avals, flags: [a.to_ct_aval() for a in pick(avals, flags)]
    y_axes = tuple(pick(rows.x_axes, marks[1]))
    return dataclasses.replace(
        rows,
        f=pull,
        const_types=(*rows.const_types, *cts(rows.out_types[0], wanted[0])),
        x_types=(*rows.x_types, *cts(rows.y_types, wanted[1])),
        x_axes=(*rows.x_axes, *axes),
        y_axes=y_axes,
        shares=(True,) * len(y_axes),
        uses_visits=True,
        meter=rows.meter and rows.meter.backward,
        is_again=False,
    )


@functools.lru_cache(maxsize=128)
def settled_rows(rows: Rows, marks: Marks, reverse: bool) -> Rows:
    """What is left of the function when it has been differentiated, see `_settled`."""
    if not has_rules(rows.chunk(*rows.probe).step.jaxpr):
        return rows

    def left(
        size: int, visits: Any, consts: Arrays, xs: Arrays
    ) -> tuple[Arrays, Arrays]:
        chunk = rows.chunk(size, visits is not None)
        flags = (*[False] * chunk.has_visits, *marks[0], *marks[1])
        step = dataclasses.replace(
            chunk.step, jaxpr=settled(chunk.step.jaxpr, flags, reverse)
        )
        return dataclasses.replace(chunk, step=step)(visits, consts, xs)

    return dataclasses.replace(rows, f=left)


@functools.lru_cache(maxsize=128)
def batched(rows: Rows, axis_data: Any, dims: Any) -> tuple[Rows, Marks]:
    """The function under `vmap`, with which outputs it batches: along their first axis.

    To batch what is done to a chunk, and not the loop over them, leaves one accumulator
    to the cotangent of an unbatched const. Inputs stay as they lie.
    """
    const_dims, x_dims = map(tuple, dims)
    is_batched = [[dim is not None for dim in group] for group in dims]
    marks = rows.reached(*is_batched, axis_name=axis_data.name)
    in_axes = (None, list(const_dims), list(x_dims))
    out_axes = tuple(map(in_front, marks))

    def batch(
        size: int, visits: Any, consts: Arrays, xs: Arrays
    ) -> tuple[Arrays, Arrays]:
        chunk = rows.chunk(size, visits is not None)
        return vmap(chunk, axis_data, in_axes, out_axes)(visits, consts, xs)

    x_axes = tuple(
        axis + (dim is not None and dim <= axis)
        for axis, dim in zip(rows.x_axes, x_dims, strict=True)
    )
    of_row = tuple(
        None if dim is None else dim - (dim > axis)
        for axis, dim in zip(x_axes, x_dims, strict=True)
    )
    grown = lambda aval, dim: (
        aval if dim is None else jex.unmapped_aval(axis_data.size, dim, aval)
    )
    grown_rows = dataclasses.replace(
        rows,
        f=batch,
        const_types=tuple(map(grown, rows.const_types, const_dims)),
        x_types=tuple(map(grown, rows.x_types, of_row)),
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


def _with(values: Arrays, tangents: Arrays, flags: Flags) -> list[Any]:
    return [*values, *instantiated(pick(tangents, flags))]
