"""The function that runs on each chunk of rows, traced for chunks of any size.

It is made of the user's function of one row (`Vectorised`). Its derivatives, and it
under `vmap`, are chunk functions again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    Arrays,
    Flags,
    SumType,
    along,
    chosen_sum_type,
    cotangent_types,
    is_inexact,
    is_narrow,
    mesh_axis_of,
    pick,
    split,
    stack_type,
    strongly_typed,
    sum_dtype,
    tangent_types,
)
from .._programs import (
    along_axis,
    batched,
    batched_axes,
    batched_types,
    has_rules,
    joined,
    pruned,
    pulled,
    pushed,
    reached,
    run,
    settled,
    traced,
)
from .._types import Aval, BatchAxis, PyTree, Value
from ..checkpointing import Step
from ..progress import NO_BARS, Again, BarChange, Meter

# For the consts and the xs, or for the sums and the ys.
MarkPair = tuple[Flags, Flags]

# How a result is reduced over the rows: "sum" or "mean"; `None` if it is stacked.
Reduction = str | None
# Results of narrower floats are added up in this type.
_SINGLE = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ChunkFunction:
    """`(visits, consts, xs) -> (sums, ys)`, for any number of rows.

    The last chunk may overlap the one before it, so that all chunks have one size. Then
    some rows are in two chunks, and must not count twice. `visits` tells which, with an
    entry for each row: 0 if the row is only in this chunk, 1 if it is also in the next
    one, and 2 if it was also in the one before:

        chunks        [0 0 0 1 1]
                            [2 2 0 0 0]

    It is left out if no row is in two chunks.

    Attributes:
        trace: A function that traces the chunk function, given this object, a number
            of rows, and whether there are `visits`. The program is
            `[*visits, *consts, *xs] -> [*sums, *ys]`.
        length: How many rows there are in all.
        const_types: The types of `consts`, which are the same for every row.
        x_types: The types of `xs`, of one row.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        shares: For each of the `ys`, whether the two chunks of a row each compute a
            share of its value, and the shares are added. Otherwise both compute the
            whole value, and one of them is written over.
        num_sums: How many of its outputs are sums.
        uses_visits: Whether the function depends on `visits`.
        probe: A size of chunk, and whether it has `visits`, to trace the function with
            when only the types of its outputs are needed.
        mesh_axis: The explicit axes of a mesh that the rows are split over, if any.
        meter: The progress bars of the map.
        changes: The changes of progress bars within the function.
        origin: The function that this one is a derivative of, or itself, if a row can
            see its chunk. Then both have the same chunks. `None` if it cannot.
        sums: The type in which sums of narrower floats are kept. By default it is that
            of where the function is made.
    """

    trace: Callable[["ChunkFunction", int, bool], jex.ClosedJaxpr]
    length: int
    const_types: tuple[Aval, ...]
    x_types: tuple[Aval, ...]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    shares: Flags
    num_sums: int
    uses_visits: bool
    probe: tuple[int, bool]
    mesh_axis: Hashable = None
    meter: Meter = NO_BARS
    changes: tuple[BarChange, ...] = ()
    origin: "ChunkFunction | None" = None
    sums: SumType = dataclasses.field(default_factory=chosen_sum_type)

    def with_bars(self, change: BarChange) -> "ChunkFunction":
        """The same with other bars."""
        changes = (*self.changes, *[change] * (change not in self.changes))
        return dataclasses.replace(
            self, meter=change.meter(self.meter), changes=changes
        )

    def program(self, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        """The program for a chunk: `[*visits, *consts, *xs] -> [*sums, *ys]`."""
        return _chunk_program(self, size, has_visits and self.uses_visits)

    def __call__(
        self, size: int, visits: PyTree, consts: Arrays, xs: Arrays
    ) -> tuple[list[Value], list[Value]]:
        """The sums and the `ys` of a chunk; `visits` may be `None`."""
        program = self.program(size, visits is not None)
        visits = [visits] * self.num_visits(visits is not None)
        return split(run(program, *visits, *consts, *xs), self.num_sums)

    def num_visits(self, has_visits: bool) -> int:
        """How many inputs of its program are `visits`: one or none."""
        return int(has_visits and self.uses_visits)

    def marks(self, has_visits: bool, consts: Flags, xs: Flags) -> tuple[Flags, Flags]:
        """The marks of all inputs of its program, from those of `consts` and `xs`."""
        return ((False,) * self.num_visits(has_visits) + consts, xs)

    @property
    def in_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `consts`, and those of `xs` for all rows."""
        xs = self.stacked(self.x_types, self.length, self.x_axes)
        return list(self.const_types), xs

    @property
    def y_types(self) -> tuple[Aval, ...]:
        """The types of `ys`, of one row."""
        size, _ = self.probe
        of_chunk = self.program(*self.probe).out_avals[self.num_sums :]
        return tuple(
            jex.mapped_aval(size, axis, aval)
            for aval, axis in zip(of_chunk, self.y_axes, strict=True)
        )

    @property
    def out_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `sums`, and those of `ys` for all rows."""
        sums = self.program(*self.probe).out_avals[: self.num_sums]
        return list(sums), self.stacked(self.y_types, self.length, self.y_axes)

    def stacked(
        self, types: Sequence[Aval], size: int, axes: Sequence[int]
    ) -> list[Aval]:
        """The types of arrays with so many rows, from the types of one row."""
        return [
            stack_type(aval, size, axis, self.mesh_axis)
            for aval, axis in zip(types, axes, strict=True)
        ]

    def reached(
        self, consts: Sequence[bool], xs: Sequence[bool], **settings: Any
    ) -> tuple[Flags, Flags]:
        """Which of the outputs depend on the marked inputs, see `reached`."""
        size, has_visits = self.probe
        marks = joined(self.marks(has_visits, tuple(consts), tuple(xs)))
        outs = reached(self.program(size, has_visits), marks, **settings)
        return outs[: self.num_sums], outs[self.num_sums :]


@functools.lru_cache(maxsize=256)
def _chunk_program(f: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
    program = f.trace(f, size, has_visits)
    for change in f.changes:
        program = change(program)
    return pruned(program)


# The function of one row, applied to many.


@dataclasses.dataclass(frozen=True)
class Vectorised:
    """A function of one row, applied to many.

    Attributes:
        row: `f`, traced on one row: a step without a carry.
        x_axes: The axis of the rows in each argument.
        y_axes: The axis of the rows in each result.
        reductions: How each result is reduced, `None` for those that are stacked.
    """

    row: Step
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    reductions: tuple[Reduction, ...]

    def on_rows(
        self, visits: PyTree, consts: Arrays, xs: Arrays
    ) -> tuple[list[Value], list[Value]]:
        """The sums and the other results for some rows, all at once."""
        one = lambda *x: self.row(consts, [], x)[1]
        if xs[0].shape[self.x_axes[0]] == 1:
            # Without `vmap`, so that a `cond` runs only one of its branches.
            y = one(*map(jnp.squeeze, xs, self.x_axes))
            ys = list(map(jnp.expand_dims, y, self.y_axes))
        else:
            ys = jax.vmap(one, in_axes=self.x_axes, out_axes=list(self.y_axes))(*xs)
        results = list(zip(ys, self.y_axes, self.reductions, strict=True))
        sums = [_total(y, visits, axis) for y, axis, how in results if how is not None]
        return sums, [y for y, _, how in results if how is None]

    def __call__(
        self, function: ChunkFunction, size: int, has_visits: bool
    ) -> jex.ClosedJaxpr:
        """Traces it, see `ChunkFunction.trace`. It closes over no tracers."""
        visits = [_visits_type(size)] if has_visits else []

        def flat(*inputs: Value) -> list[Value]:
            counts = len(visits), len(function.const_types)
            visits_, consts, xs = split(inputs, *counts)
            sums, ys = self.on_rows(visits_[0] if visits else None, consts, xs)
            return [*sums, *ys]

        xs = function.stacked(function.x_types, size, function.x_axes)
        return traced(flat, [*visits, *function.const_types, *xs])

    def chunk_function(
        self,
        name: str,
        consts: Arrays,
        xs: Arrays,
        size: int,
        probe: tuple[int, bool],
    ) -> ChunkFunction:
        """The chunk function, for chunks of any size."""
        const_types, x_types = (
            [jax.typeof(strongly_typed(x)) for x in group] for group in (consts, xs)
        )
        y_axes = pick(self.y_axes, [how is None for how in self.reductions])
        return ChunkFunction(
            trace=self,
            length=size,
            const_types=tuple(const_types),
            x_types=tuple(
                jex.mapped_aval(size, axis, aval)
                for aval, axis in zip(x_types, self.x_axes, strict=True)
            ),
            x_axes=self.x_axes,
            y_axes=tuple(y_axes),
            shares=(False,) * len(y_axes),
            num_sums=len(self.y_axes) - len(y_axes),
            uses_visits=len(y_axes) < len(self.y_axes),
            probe=probe,
            mesh_axis=_mesh_axis(name, x_types, self.x_axes, probe[0]),
        )


def _mesh_axis(
    name: str, x_types: Sequence[Aval], axes: Sequence[int], size: int
) -> Hashable:
    """The explicit axes of a mesh that rows are split over, if they are."""
    found = list(map(mesh_axis_of, x_types, axes))
    mesh_axis = found[0]
    if mesh_axis is None and not any(found):
        return None
    sizes = jax.sharding.get_abstract_mesh().shape
    names = mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,)
    parts = math.prod(sizes.get(name, 1) for name in names)
    is_even = set(found) == {mesh_axis} and size % parts == 0
    if not is_even:
        listing = "\n".join(
            f"  {aval.str_short(True)} along axis {axis}"
            for aval, axis in zip(x_types, axes, strict=True)
        )
        raise ValueError(
            f"{name}: rows that are split over devices of an explicit mesh must all be "
            f"split in the same way, and so must each chunk, which has {size} rows "
            f"here:\n{listing}\nUse `el.ParallelMap`, which runs chunks on each device "
            f"by itself, or choose another chunk_size."
        )
    return mesh_axis


def _visits_type(size: int) -> Aval:
    """The type of `visits` for so many rows."""
    return jax.ShapeDtypeStruct((size,), jnp.int8)


def _total(y: Value, visits: PyTree, axis: int) -> Value:
    """The sum over the rows of a chunk; a row in two chunks counts half in each."""
    # Integers cannot be halved, and count only in the second of the two chunks. Floats
    # of 16 bits and less are added up in 32 bits.
    if visits is not None and is_inexact(y):
        y = _halved(y, visits, axis)
    elif visits is not None:
        y = jnp.where(along(visits == 1, (axis,), y), jnp.zeros_like(y), y)
    return jnp.sum(y, axis, dtype=_SINGLE if is_narrow(y, _SINGLE) else None)


def _halved(y: Value, visits: PyTree, axis: int) -> Value:
    """Rows, where those that are in two chunks are divided by two."""
    return jnp.where(along(visits > 0, (axis,), y), y / 2, y)


def finish(how: Reduction, total: Value, length: int, dtype: np.dtype) -> Value:
    """The reduction, from the sum over all rows; `dtype` is that of one row."""
    if how == "mean":
        total = total / length
    return total.astype(dtype) if sum_dtype(dtype, _SINGLE) != dtype else total


# Derivatives. A row that is in two chunks must count once. It would not do to make the
# cotangent of one of the two zero: where a derivative is infinite, zero times infinity
# is NaN. So each of the two gets half of the cotangent. The results are linear in the
# cotangent, so their sum is right.


@functools.lru_cache(maxsize=128)
def pushed_function(f: ChunkFunction, moves: MarkPair, out: MarkPair) -> ChunkFunction:
    """The jvp: the outputs and their tangents, from inputs and their tangents."""

    def push(_: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        program = f.program(size, has_visits)
        return pushed(program, f.marks(has_visits, *moves), out)

    twofold = lambda entries, flags: (*entries, *pick(entries, flags))
    return dataclasses.replace(
        f,
        trace=push,
        const_types=(*f.const_types, *tangent_types(f.const_types, moves[0])),
        x_types=(*f.x_types, *tangent_types(f.x_types, moves[1])),
        x_axes=twofold(f.x_axes, moves[1]),
        y_axes=twofold(f.y_axes, out[1]),
        shares=twofold(f.shares, out[1]),
        num_sums=f.num_sums + sum(out[0]),
        meter=f.meter.tangents,
    )


@functools.lru_cache(maxsize=128)
def pulled_function(
    f: ChunkFunction, marks: MarkPair, wanted: MarkPair
) -> ChunkFunction:
    """The vjp: cotangents of marked inputs, from inputs and cotangents of outputs."""
    # The cotangents of consts are sums, and those of `xs` are `ys`, of which the two
    # chunks of a row each give a share.
    axes, shares = pick(f.y_axes, wanted[1]), pick(f.shares, wanted[1])
    again = f.with_bars(Again())

    def pull(_: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        moves = again.marks(has_visits, *marks)
        program = pulled(again.program(size, has_visits), moves, wanted, f.sums)
        if not has_visits:
            return program
        num_visits = again.num_visits(has_visits)

        def halve(visits: PyTree, *flat: Value) -> list[Value]:
            before, ct_ys = split(flat, len(flat) - len(axes))
            ct_ys = [
                ct if share else _halved(ct, visits, axis)
                for ct, share, axis in zip(ct_ys, shares, axes, strict=True)
            ]
            return run(program, *[visits] * num_visits, *before, *ct_ys)

        return traced(halve, [_visits_type(size), *program.in_avals[num_visits:]])

    y_axes = tuple(pick(f.x_axes, marks[1]))
    return dataclasses.replace(
        f,
        trace=pull,
        const_types=(*f.const_types, *cotangent_types(f.out_types[0], wanted[0])),
        x_types=(*f.x_types, *cotangent_types(f.y_types, wanted[1])),
        x_axes=(*f.x_axes, *axes),
        y_axes=y_axes,
        shares=(True,) * len(y_axes),
        num_sums=sum(marks[0]),
        uses_visits=True,
        meter=f.meter.backward,
        changes=(),
    )


@functools.lru_cache(maxsize=128)
def settled_function(f: ChunkFunction, marks: MarkPair, reverse: bool) -> ChunkFunction:
    """The function after it has been differentiated once, see `settled`."""
    if not has_rules(f.program(*f.probe)):
        return f

    def settle(_: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        flags = joined(f.marks(has_visits, *marks))
        return settled(f.program(size, has_visits), flags, reverse)

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

    def batch(_: ChunkFunction, size: int, has_visits: bool) -> jex.ClosedJaxpr:
        of_visits = [None] * f.num_visits(has_visits)
        in_dims, out_dims = (*of_visits, *const_dims, *x_dims), in_front(joined(marks))
        # Chunks of this size may not have been traced yet, and `f` may use the axis.
        program = along_axis(lambda: f.program(size, has_visits), axis_data)
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
