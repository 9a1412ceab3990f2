"""A map over rows as a primitive of its own, whose derivatives are maps over rows.

A map takes `consts`, which are the same for every row, and `xs`, which have rows, to
`sums` over the rows and to `ys`, which have rows. Its derivative in forward mode is one
of these: with a tangent for each input and output. So is its derivative in reverse
mode: the cotangents of `consts` are sums over the rows, and those of `xs` have rows.
So derivatives of any order take the memory of one chunk, with one accumulator for each
const, and nothing is stored from the one sweep for the other but the inputs.

A row that is in two chunks must count once. It will not do to leave out the cotangent
of one of the two, as zero times an infinite derivative is not a number: where a row is
given the same value twice, each of the two gets half of the cotangent, and from there
on, what is linear in it adds up.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._formula import (
    Formula,
    Static,
    Zero,
    instantiated,
    is_inexact,
    nonzero,
    vmap,
)
from .._lists import Arrays, Flags, pick, put, split
from .._recall import recall
from ..checkpointing._policies import save_nothing
from ..checkpointing.engine._forward import Saveable
from ..checkpointing.engine._step import strongly_typed
from ._chunks import Chunks
from ._stored import run_stored
from ._sweep import Sweep, along, resized, trace_chunk

Marks = tuple[Flags, Flags]


def map_rows(
    f: Callable[[Arrays, Arrays], Arrays],
    consts: Arrays,
    xs: Arrays,
    *,
    x_axes: tuple[int, ...],
    y_axes: tuple[int, ...],
    chunks: Chunks,
    policy: Saveable,
) -> list[jax.Array]:
    """Maps a function over rows, chunk by chunk.

    Args:
        f: `(consts, xs) -> ys` on the rows of a chunk. It closes over no tracers.
        consts: What is the same for every row.
        xs: What has rows.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        chunks: How the rows are cut.
        policy: What is stored of all rows for the backward pass, as `jax.checkpoint`
            has it; `None` for nothing but the inputs.

    Returns:
        The `ys` of all rows.
    """
    consts, xs = list(map(strongly_typed, consts)), list(map(strongly_typed, xs))
    chunk = trace_chunk(
        lambda twice, consts, xs: ([], f(consts, xs)),
        [jax.typeof(c) for c in consts],
        [
            resized(jax.typeof(x), axis, chunks.rows, chunks.size)
            for x, axis in zip(xs, x_axes, strict=True)
        ],
        chunks,
    )
    sweep = Sweep(chunk, chunks, x_axes, y_axes, (False,) * len(y_axes))
    policy = None if policy == save_nothing else policy
    _, ys = RowMap(sweep, policy, (consts, xs))(consts, xs)
    return ys


class RowMap(Formula):
    """`(consts, xs) -> (sums, ys)`, by a sweep.

    Attributes:
        policy: What to store of all rows for the backward pass; `None` for a map that
            has sums, and where nothing is to be stored but the inputs.
    """

    sweep: Sweep
    policy: Saveable

    def __init__(self, sweep: Sweep, policy: Saveable, inputs: Any):
        self.in_avals = jax.tree.map(jax.typeof, inputs)
        self.out_aval = sweep.out_types
        self.params = {"sweep": sweep, "policy": policy}
        self.effects = sweep.chunk.step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        known = recall(self, self.flat_in(inputs))
        return self.sweep.run(*inputs) if known is None else known

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        moves_in = nonzero(tangents)
        moves_out = self.moves_out(self.flat_in(moves_in))
        out = self.out_tree.unflatten(moves_out)
        pushed = _pushed(self.sweep, _flags(moves_in), _flags(out))
        inputs = tuple(map(_with, primals, tangents, moves_in))
        sums, ys = RowMap(pushed, self.policy, inputs)(*inputs)
        sums, sums_dot = split(sums, len(self.out_aval[0]))
        ys, ys_dot = split(ys, len(self.out_aval[1]))
        tangents = self.among_zeros(self.flat_in(moves_in), [*sums_dot, *ys_dot])
        return (sums, ys), tangents

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        if self.policy is None:
            return super().vjp_fwd(nzs_in, *inputs)
        marks = _flags(map(_may_move, nzs_in, self.in_avals))
        moving = [is_inexact(aval) for aval in self.out_aval[1]]

        def run(*marked: Arrays) -> tuple[Arrays, Arrays]:
            merged = map(put, inputs, marks, marked)
            ys = run_stored(self.sweep, self.policy, *merged)
            return pick(ys, moving), ys

        _, pull, ys = jax.vjp(run, *map(pick, inputs, marks), has_aux=True)
        return ([], ys), (Static((marks, moving)), pull)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        if self.policy is None:
            return super().vjp_bwd_retval(res, outgrad)
        static, pull = res
        marks, moving = static.value
        cts = pull(instantiated(pick(outgrad[1], moving)))
        return tuple(map(put, self._zero_cts(), marks, cts))

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        marks = _flags(map(_may_move, perturbed, self.in_avals))
        wanted = _flags(map(_may_move, nonzero(cts), self.out_aval))
        zeros = self._zero_cts()
        if not any(map(any, marks)) or not any(map(any, wanted)):
            return zeros
        pulled = _pulled(self.sweep, marks, wanted)
        inputs = tuple(map(_with, inputs, cts, wanted))
        out = RowMap(pulled, None, inputs)(*inputs)
        return tuple(map(put, zeros, marks, out))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        consts, xs = self.in_tree.unflatten(moves_in)
        sums, ys = self.sweep.chunk.reached(consts, xs, through=is_inexact)
        return [*sums, *ys]

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if not jax.tree.leaves(dims):
            return super().batch(axis_data, args, dims)
        batched, marks = _batched(self.sweep, axis_data, tuple(map(tuple, dims)))
        out = RowMap(batched, self.policy, args)(*args)
        return out, tuple(map(_in_front, marks))

    def _zero_cts(self) -> Any:
        return jax.tree.map(lambda aval: Zero(aval.to_ct_aval()), self.in_avals)


# The sweeps of derivatives, and under `vmap`. All depend on the types alone, so they
# are traced once.


@functools.lru_cache(maxsize=128)
def _pushed(sweep: Sweep, moves: Marks, out: Marks) -> Sweep:
    """The outputs, and the tangents of some of them, from inputs and their tangents."""
    const_types, x_types = sweep.chunk.in_types

    def push(twice: Any, consts: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        consts, consts_dot = split(consts, len(const_types))
        xs, xs_dot = split(xs, len(x_types))
        run = lambda *marked: sweep.chunk(twice, *map(put, (consts, xs), moves, marked))
        primals = tuple(map(pick, (consts, xs), moves))
        values, tangents = jax.jvp(run, primals, (consts_dot, xs_dot))
        sums, ys = map(_with, values, tangents, out)
        return sums, ys

    dots = lambda avals, flags: [a.to_tangent_aval() for a in pick(avals, flags)]
    twofold = lambda entries, flags: (*entries, *pick(entries, flags))
    return Sweep(
        trace_chunk(
            push,
            [*const_types, *dots(const_types, moves[0])],
            [*x_types, *dots(x_types, moves[1])],
            sweep.chunks,
        ),
        sweep.chunks,
        twofold(sweep.x_axes, moves[1]),
        twofold(sweep.y_axes, out[1]),
        twofold(sweep.shares, out[1]),
    )


@functools.lru_cache(maxsize=128)
def _pulled(sweep: Sweep, marks: Marks, wanted: Marks) -> Sweep:
    """The cotangents of marked inputs, from the inputs and cotangents of outputs."""
    const_types, x_types = sweep.chunk.in_types
    axes, shares = pick(sweep.y_axes, wanted[1]), pick(sweep.shares, wanted[1])

    def pull(twice: Any, consts: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        consts, ct_sums = split(consts, len(const_types))
        xs, ct_ys = split(xs, len(x_types))

        def run(*marked: Arrays) -> Any:
            out = sweep.chunk(twice, *map(put, (consts, xs), marks, marked))
            return tuple(map(pick, out, wanted))

        _, back = jax.vjp(run, *map(pick, (consts, xs), marks))
        ct_ys = [
            ct if twice is None or share else _halved(ct, twice, axis)
            for ct, share, axis in zip(ct_ys, shares, axes, strict=True)
        ]
        return back((ct_sums, ct_ys))

    cts = lambda avals, flags: [a.to_ct_aval() for a in pick(avals, flags)]
    sum_types, y_types = sweep.chunk.out_types
    y_axes = tuple(pick(sweep.x_axes, marks[1]))
    return Sweep(
        trace_chunk(
            pull,
            [*const_types, *cts(sum_types, wanted[0])],
            [*x_types, *cts(y_types, wanted[1])],
            sweep.chunks,
        ),
        sweep.chunks,
        (*sweep.x_axes, *axes),
        y_axes,
        (True,) * len(y_axes),
    )


def _halved(ct: Any, twice: Any, axis: int) -> Any:
    return jnp.where(along(twice, axis, ct), ct / 2, ct)


@functools.lru_cache(maxsize=128)
def _batched(sweep: Sweep, axis_data: Any, dims: Any) -> tuple[Sweep, Marks]:
    """The sweep under `vmap`, with which outputs it batches: along their first axis.

    To batch what is done to a chunk, and not the loop over them, leaves one accumulator
    to the cotangent of an unbatched const. Inputs stay as they lie.
    """
    const_dims, x_dims = dims
    is_batched = [[dim is not None for dim in group] for group in dims]
    marks = sweep.chunk.reached(*is_batched, axis_name=axis_data.name)
    const_types, x_types = (
        [
            aval if dim is None else jex.unmapped_aval(axis_data.size, dim, aval)
            for aval, dim in zip(avals, group, strict=True)
        ]
        for avals, group in zip(sweep.chunk.in_types, dims, strict=True)
    )
    in_axes = (None, list(const_dims), list(x_dims))
    out_axes = tuple(map(_in_front, marks))
    x_axes = tuple(
        axis + (dim is not None and dim <= axis)
        for axis, dim in zip(sweep.x_axes, x_dims, strict=True)
    )
    y_axes = tuple(
        axis + batched for axis, batched in zip(sweep.y_axes, marks[1], strict=True)
    )
    batched = vmap(sweep.chunk, axis_data, in_axes, out_axes)
    chunk = trace_chunk(batched, const_types, x_types, sweep.chunks)
    sweep = dataclasses.replace(sweep, chunk=chunk, x_axes=x_axes, y_axes=y_axes)
    return sweep, marks


# Pairs of lists: of consts and xs, or of sums and ys.


def _with(values: Sequence[Any], more: Sequence[Any], flags: Sequence[bool]) -> list:
    """Values, followed by those of some more that are marked."""
    return [*values, *instantiated(pick(more, flags))]


def _flags(groups: Any) -> Marks:
    first, second = (tuple(map(bool, group)) for group in groups)
    return first, second


def _in_front(flags: Sequence[bool]) -> list[int | None]:
    return [0 if flag else None for flag in flags]


def _may_move(flags: Sequence[Any], avals: Sequence[Any]) -> list[bool]:
    return [bool(f) and is_inexact(a) for f, a in zip(flags, avals, strict=True)]
