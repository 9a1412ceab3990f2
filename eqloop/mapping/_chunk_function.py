"""The function that runs on each chunk of rows, traced for chunks of any size.

It is made of the user's function of one row (`Vectorised`). Its derivatives, and it
under `vmap`, are chunk functions again.
"""

import dataclasses
import functools
import math
import operator
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
    chosen_sum_type,
    is_narrow,
    mesh_axis_of,
    pick,
    split,
    stack_type,
    strongly_typed,
    sum_dtype,
)
from .._programs import Rewrite, joined, pruned, reached, run, traced
from .._types import Aval, Value
from ..checkpointing import Step
from ..progress import NO_BARS, BarChange, Meter

# For the consts and the xs, or for the sums and the ys.
MarkPair = tuple[Flags, Flags]

# How a result is reduced over the rows: "sum" or "mean"; `None` if it is stacked.
Reduction = str | None
# Results of narrower floats are added up in this type.
_SINGLE = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class ChunkFunction:
    """`(consts, xs) -> (sums, ys)`, for any number of rows.

    Attributes:
        trace: A function that traces the chunk function, given this object and a number
            of rows. The program is `[*consts, *xs] -> [*sums, *ys]`.
        length: How many rows there are in all.
        const_types: The types of `consts`, which are the same for every row.
        x_types: The types of `xs`, of one row.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        num_sums: How many of its outputs are sums.
        probe: A size of chunk to trace the function with when only the types of its
            outputs are needed.
        mesh_axis: The explicit axes of a mesh that the rows are split over, if any.
        meter: The progress bars of the map.
        changes: The changes of progress bars within the function.
        origin: The function that this one is a derivative of, or itself, if a row can
            see its chunk. Then both have the same chunks. `None` if it cannot.
        sums: The type in which sums of narrower floats are kept. By default it is that
            of where the function is made.
    """

    trace: Callable[["ChunkFunction", int], jex.ClosedJaxpr]
    length: int
    const_types: tuple[Aval, ...]
    x_types: tuple[Aval, ...]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    num_sums: int
    probe: int
    mesh_axis: Hashable = None
    meter: Meter = NO_BARS
    changes: tuple[BarChange, ...] = ()
    origin: "ChunkFunction | None" = None
    sums: SumType = dataclasses.field(default_factory=chosen_sum_type)

    @classmethod
    def of(
        cls,
        trace: Callable[["ChunkFunction", int], jex.ClosedJaxpr],
        length: int,
        consts: Arrays,
        xs: Arrays,
        x_axes: tuple[int, ...],
        **others: Any,
    ) -> "ChunkFunction":
        """The function for these inputs, of all rows."""
        const_types, x_types = (
            [jax.typeof(strongly_typed(x)) for x in group] for group in (consts, xs)
        )
        row_types = map(functools.partial(jex.mapped_aval, length), x_axes, x_types)
        types = tuple(const_types), tuple(row_types)
        return cls(trace, length, *types, x_axes, **others)

    def with_bars(self, change: BarChange) -> "ChunkFunction":
        """The function with other bars."""
        changes = (*self.changes, *[change] * (change not in self.changes))
        return dataclasses.replace(
            self, meter=change.meter(self.meter), changes=changes
        )

    def rewritten(self, rewrite: Rewrite, sizes: Sequence[int]) -> "ChunkFunction":
        """The function with rewritten programs, in chunks of these sizes alone."""
        old = [self.program(size) for size in sizes]
        new = list(map(rewrite, old))
        if all(map(operator.is_, old, new)):
            return self
        trace = _Given(tuple(zip(sizes, new, strict=True)))
        return dataclasses.replace(self, trace=trace, changes=())

    def program(self, size: int) -> jex.ClosedJaxpr:
        """The program for a chunk: `[*consts, *xs] -> [*sums, *ys]`."""
        return _chunk_program(self, size)

    def __call__(
        self, size: int, consts: Arrays, xs: Arrays
    ) -> tuple[list[Value], list[Value]]:
        """The sums and the `ys` of a chunk."""
        return split(run(self.program(size), *consts, *xs), self.num_sums)

    @property
    def in_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `consts`, and those of `xs` for all rows."""
        xs = self.stacked(self.x_types, self.length, self.x_axes)
        return list(self.const_types), xs

    @property
    def y_types(self) -> tuple[Aval, ...]:
        """The types of `ys`, of one row."""
        of_chunk = self.program(self.probe).out_avals[self.num_sums :]
        return tuple(
            jex.mapped_aval(self.probe, axis, aval)
            for aval, axis in zip(of_chunk, self.y_axes, strict=True)
        )

    @property
    def out_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `sums`, and those of `ys` for all rows."""
        sums = self.program(self.probe).out_avals[: self.num_sums]
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
        marks = joined((tuple(consts), tuple(xs)))
        outs = reached(self.program(self.probe), marks, **settings)
        return outs[: self.num_sums], outs[self.num_sums :]


@functools.lru_cache(maxsize=256)
def _chunk_program(f: ChunkFunction, size: int) -> jex.ClosedJaxpr:
    program = f.trace(f, size)
    for change in f.changes:
        program = change(program)
    return pruned(program)


@dataclasses.dataclass(frozen=True)
class _Given:
    """Programs of a chunk function that have been traced, each with its size."""

    programs: tuple[tuple[int, jex.ClosedJaxpr], ...]

    def __call__(self, _: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        return dict(self.programs)[size]


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

    def on_rows(self, consts: Arrays, xs: Arrays) -> tuple[list[Value], list[Value]]:
        """The sums and the other results for some rows, all at once."""
        one = lambda *x: self.row(consts, [], x)[1]
        if xs[0].shape[self.x_axes[0]] == 1:
            # Without `vmap`, so that a `cond` runs only one of its branches.
            y = one(*map(jnp.squeeze, xs, self.x_axes))
            ys = list(map(jnp.expand_dims, y, self.y_axes))
        else:
            ys = jax.vmap(one, in_axes=self.x_axes, out_axes=list(self.y_axes))(*xs)
        results = list(zip(ys, self.y_axes, self.reductions, strict=True))
        sums = [_total(y, axis) for y, axis, how in results if how is not None]
        return sums, [y for y, _, how in results if how is None]

    def __call__(self, function: ChunkFunction, size: int) -> jex.ClosedJaxpr:
        """Traces it, see `ChunkFunction.trace`. It closes over no tracers."""

        def flat(*inputs: Value) -> list[Value]:
            consts, xs = split(inputs, len(function.const_types))
            sums, ys = self.on_rows(consts, xs)
            return [*sums, *ys]

        xs = function.stacked(function.x_types, size, function.x_axes)
        return traced(flat, [*function.const_types, *xs])

    def chunk_function(
        self, name: str, consts: Arrays, xs: Arrays, size: int, probe: int
    ) -> ChunkFunction:
        """The chunk function, for chunks of any size."""
        y_axes = tuple(pick(self.y_axes, [how is None for how in self.reductions]))
        num_sums = len(self.y_axes) - len(y_axes)
        mesh_axis = _mesh_axis(name, list(map(jax.typeof, xs)), self.x_axes, probe)
        others = dict(num_sums=num_sums, probe=probe, mesh_axis=mesh_axis)
        inputs = consts, xs, self.x_axes
        return ChunkFunction.of(self, size, *inputs, y_axes=y_axes, **others)


def number_of_parts(mesh_axis: Hashable) -> int:
    """In how many parts axes of a mesh split an array: in one, if they are none."""
    sizes = jax.sharding.get_abstract_mesh().shape
    names = mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,)
    return math.prod(sizes.get(name, 1) for name in names)


def _mesh_axis(
    name: str, x_types: Sequence[Aval], axes: Sequence[int], size: int
) -> Hashable:
    """The explicit axes of a mesh that rows are split over, if they are."""
    found = list(map(mesh_axis_of, x_types, axes))
    mesh_axis = found[0]
    if mesh_axis is None and not any(found):
        return None
    is_even = set(found) == {mesh_axis} and size % number_of_parts(mesh_axis) == 0
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


def _total(y: Value, axis: int) -> Value:
    """The sum over the rows of a chunk; floats of 16 bits and less in 32 bits."""
    return jnp.sum(y, axis, dtype=_SINGLE if is_narrow(y, _SINGLE) else None)


def finish(how: Reduction, total: Value, length: int, dtype: np.dtype) -> Value:
    """The reduction, from the sum over all rows; `dtype` is that of one row."""
    if how == "mean":
        total = total / length
    return total.astype(dtype) if sum_dtype(dtype, _SINGLE) != dtype else total
