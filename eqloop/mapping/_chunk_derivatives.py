"""Derivatives of chunk functions, and chunk functions under `vmap`: the same again."""

import dataclasses
import functools

import jax.extend.core as jex

from .._arrays import Flags, cotangent_types, pick, tangent_types
from .._programs import (
    along_axis,
    batched,
    batched_axes,
    batched_types,
    has_rules,
    joined,
    jvp_of,
    settled,
    vjp_of,
)
from .._types import BatchAxis, PyTree
from ..progress import Again
from ._chunk_function import ChunkFunction, MarkPair


@functools.lru_cache(maxsize=128)
def jvp_function(f: ChunkFunction, nonzeros: MarkPair, out: MarkPair) -> ChunkFunction:
    """The jvp: the outputs and their tangents, from inputs and their tangents."""

    def push(_: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        return jvp_of(f.program(size), nonzeros, out)

    twofold = lambda entries, flags: (*entries, *pick(entries, flags))
    return dataclasses.replace(
        f,
        trace=push,
        const_types=(*f.const_types, *tangent_types(f.const_types, nonzeros[0])),
        x_types=(*f.x_types, *tangent_types(f.x_types, nonzeros[1])),
        x_axes=twofold(f.x_axes, nonzeros[1]),
        y_axes=twofold(f.y_axes, out[1]),
        num_sums=f.num_sums + sum(out[0]),
        meter=f.meter.tangents,
    )


@functools.lru_cache(maxsize=128)
def vjp_function(f: ChunkFunction, marks: MarkPair, wanted: MarkPair) -> ChunkFunction:
    """The vjp: cotangents of marked inputs, from inputs and cotangents of outputs."""
    # The cotangents of consts are sums, and those of `xs` are `ys`.
    again = f.with_bars(Again())

    def pull(_: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        return vjp_of(again.program(size), marks, wanted, f.sums)

    return dataclasses.replace(
        f,
        trace=pull,
        const_types=(*f.const_types, *cotangent_types(f.out_types[0], wanted[0])),
        x_types=(*f.x_types, *cotangent_types(f.y_types, wanted[1])),
        x_axes=(*f.x_axes, *pick(f.y_axes, wanted[1])),
        y_axes=tuple(pick(f.x_axes, marks[1])),
        num_sums=sum(marks[0]),
        meter=f.meter.backward,
        changes=(),
    )


@functools.lru_cache(maxsize=128)
def settled_function(f: ChunkFunction, marks: MarkPair, reverse: bool) -> ChunkFunction:
    """The function after it has been differentiated once, see `settled`."""
    if not has_rules(f.program(f.probe)):
        return f

    def settle(_: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        return settled(f.program(size), joined(marks), reverse)

    return dataclasses.replace(f, trace=settle)


@functools.lru_cache(maxsize=128)
def batched_function(
    f: ChunkFunction, axis_data: BatchAxis, dims: PyTree
) -> tuple[ChunkFunction, MarkPair]:
    """The function under `vmap`, and which of its outputs are batched."""
    # The function is batched, not the loop over chunks. So the cotangent of a const
    # that is not batched is one sum. Inputs stay as they are; outputs are batched along
    # their first axis.
    const_dims, x_dims = map(tuple, dims)
    is_batched = [[dim is not None for dim in group] for group in dims]
    marks = f.reached(*is_batched, axis_name=axis_data.name)

    def batch(_: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        in_dims, out_dims = (*const_dims, *x_dims), in_front(joined(marks))
        # Chunks of this size may not have been traced yet, and `f` may use the axis.
        program = along_axis(lambda: f.program(size), axis_data)
        return batched(program, axis_data, in_dims, tuple(out_dims))

    x_axes, of_row = batched_axes(f.x_axes, x_dims)
    if (origin := f.origin) is not None:
        # The inputs of a derivative begin with those of the function.
        of_origin = const_dims[: len(origin.const_types)], x_dims[: len(origin.x_types)]
        if any(dim is not None for group in of_origin for dim in group):
            origin, _ = batched_function(origin, axis_data, of_origin)
    grown = dataclasses.replace(
        f,
        trace=batch,
        const_types=tuple(batched_types(f.const_types, const_dims, axis_data)),
        x_types=tuple(batched_types(f.x_types, of_row, axis_data)),
        x_axes=x_axes,
        y_axes=tuple(map(int.__add__, f.y_axes, map(int, marks[1]))),
        origin=origin,
    )
    return grown, marks


def in_front(flags: Flags) -> list[int | None]:
    """The batch axis of each output: the first one, if it is batched."""
    return [0 if flag else None for flag in flags]
