"""Rows on the devices of a mesh, each of which has its share of the rows.

If the function has no collectives, there is a program for one device, which all of them
run (`jax.shard_map`). Collectives are over all rows. The same program will do if each
device has one row. If it has several, there is one program for all rows, as under
`jax.vmap`: in it a collective is a reduction over the rows, which the compiler divides
among the devices.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from .._arrays import (
    AlongAxes,
    Arrays,
    Rest,
    chosen_sum_type,
    is_inexact,
    partition,
    refuse_symbolic,
)
from .._calls import OpenedCall, Outputs
from .._programs import axes_named, has_backward_rules, run, sees_batch, shared
from .._types import PyTree, Value
from ..checkpointing import Budget
from ._fitting import ChunkPlanner
from ._mesh import SomeMesh, constrained, place
from ._open_map import OpenedMap, OpenedRow, open_row, planner_for, trace_call
from ._vmap import Vmap

_NAME = "ParallelMap"


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """A call of `ParallelMap`.

    Attributes:
        chunk_size: How many rows a device maps at once.
        axis: The axis of the mesh that the rows are split over.
    """

    f: Callable[..., PyTree]
    arguments: AlongAxes
    in_axes: PyTree
    out_axes: PyTree
    chunk_size: int | Budget | None
    mesh: SomeMesh
    axis: Hashable

    @property
    def missing(self) -> int:
        """How many rows have to be added so that each device has equally many."""
        return -self.arguments.length % self.mesh.shape[self.axis]

    @property
    def share(self) -> int:
        """How many rows each device has."""
        return -(-self.arguments.length // self.mesh.shape[self.axis])

    @property
    def specs(self) -> list[PartitionSpec]:
        """How the mapped arrays are split over the mesh."""
        return [PartitionSpec(*[None] * at, self.axis) for at in self.arguments.axes]

    def run(self) -> PyTree:
        """Runs the map. Returns the user's result."""
        instead = "Map them on one device, by `el.Vmap`"
        need = "to split rows over devices"
        refuse_symbolic(_NAME, self.arguments.length, need, instead)
        whole, rest = partition((self.f, self.arguments.rest.leaves))
        xs, axes = self.arguments.arrays, self.arguments.axes
        if self.missing:
            xs = [padded(x, at, self.missing) for x, at in zip(xs, axes, strict=True)]
        if {self.axis} == set(self.mesh.axis_names):
            whole = place(whole, self.mesh, [PartitionSpec()] * len(whole))
            xs = place(xs, self.mesh, self.specs)
        elif AxisType.Explicit in self.mesh.axis_types:
            xs = self._constrained(xs)
        # Whether there are collectives shows only when `f` is traced for one device.
        with contextlib.suppress(_HasCollectives):
            return self._by_device(rest, whole, xs)
        self._check_collectives()
        return self._as_one(rest, whole, xs)

    def _by_device(self, rest: Rest, whole: Arrays, xs: Arrays) -> PyTree:
        """One program for each device."""
        on_device = self._on_device(rest)
        # Cotangents of what is whole on every device are added up over the devices.
        whole, own = shared(whole, chosen_sum_type())
        run = jax.shard_map(
            lambda whole, xs: on_device.on_arrays(own(whole), xs),
            mesh=self.mesh,
            in_specs=(PartitionSpec(), self.specs),
            out_specs=(PartitionSpec(self.axis), PartitionSpec()),
            axis_names={self.axis},
            # The check would refuse a carry in `f` that becomes the same on all
            # devices, for example by a sum over them, and branches that differ in this.
            check_vma=False,
        )
        stacked, same = jax.jit(run)(whole, xs)
        outputs, are_alike = on_device.kept
        if self.missing:
            # JAX does not slice along an axis that is split over an explicit mesh.
            everywhere = PartitionSpec()
            stacked = [constrained(y, self.mesh, everywhere) for y in stacked]
            stacked = [
                without_padding(y, self.missing, shared=are_alike) for y in stacked
            ]
        return outputs.join_stacked(stacked, same)

    def _on_device(
        self, rest: Rest
    ) -> OpenedCall[tuple[Arrays, Arrays], tuple[Outputs, bool]]:
        """The call for the rows of one device, as a function of arrays."""
        # It keeps the results without their arrays, and whether rows that are copies of
        # each other may share a cotangent.

        def join(whole: Arrays, xs: Arrays) -> tuple[Callable[..., PyTree], AlongAxes]:
            f, arguments = _join_whole(self.arguments, rest, whole)
            return f, dataclasses.replace(arguments, arrays=list(xs), length=self.share)

        def call(f: Callable[..., PyTree], arguments: AlongAxes) -> OpenedMap:
            row = open_row(_NAME, f, arguments.rest, self.out_axes)
            return trace_call(_NAME, self._without_collectives(row), arguments)

        def take(
            traced: OpenedMap,
        ) -> tuple[tuple[Arrays, Arrays], tuple[Outputs, bool]]:
            ys = traced.results(self._planner)
            axes = traced.outputs.stacked_axes
            stacked = [jnp.moveaxis(y, at, 0) for y, at in zip(ys, axes, strict=True)]
            row = traced.f.row.jaxpr
            are_alike = not self.missing or not (
                has_backward_rules(row) or sees_batch(row)
            )
            return (stacked, traced.same), (traced.outputs, are_alike)

        return OpenedCall(join, call, take)

    def _without_collectives(self, row: OpenedRow) -> OpenedRow:
        """`f` on one row; raises if it has collectives over the rows of a device."""

        def call(x: Arrays) -> list[Value]:
            # Traced by itself to see its collectives. The axis has the size that the
            # user sees, the number of rows, and not that of devices.
            axis_env = [(self.axis, self.arguments.length)]
            closed = jax.make_jaxpr(row.on_arrays, axis_env=axis_env)(x)
            names = axes_named(closed.effects)
            if self.axis in names and (self.missing or self.share > 1):
                raise _HasCollectives
            return run(closed, *x)

        take = lambda ys: (ys, row.kept)
        return OpenedCall(lambda x: [x], call, take, row.known_as)

    @property
    def _planner(self) -> ChunkPlanner:
        return planner_for(self.chunk_size or max(self.share, 1))

    def _as_one(self, rest: Rest, whole: Arrays, xs: Arrays) -> PyTree:
        """One program for all rows."""

        def run(whole: Arrays, xs: Arrays) -> PyTree:
            f, arguments = _join_whole(self.arguments, rest, whole)
            args, kwargs = arguments.rest.join(self._constrained(xs))
            axes = dict(in_axes=self.in_axes, out_axes=self.out_axes)
            return Vmap(f, axis_name=self.axis, **axes)(*args, **kwargs)

        return eqx.filter_jit(run)(whole, xs)

    def _constrained(self, xs: Arrays) -> list[jax.Array]:
        return [
            constrained(x, self.mesh, spec)
            for x, spec in zip(xs, self.specs, strict=True)
        ]

    def _check_collectives(self) -> None:
        """Raises unless all rows are there at once, equally many on each device."""
        name = f"the collectives in f (`jax.lax.psum` and the like, over {self.axis!r})"
        if self.missing:
            raise ValueError(
                f"{_NAME}: {name} are over all rows, so each device must have equally "
                f"many, but there are {self.arguments.length} rows for "
                f"{self.mesh.shape[self.axis]} devices. Change the number of rows, or "
                f"give fewer `devices`."
            )
        size = self.chunk_size
        if not self._planner.is_whole(self.share):
            raise ValueError(
                f"{_NAME}: {name} need all rows at once, but chunk_size={size} and "
                f"each device has {self.share} rows. Leave out chunk_size, or reduce "
                f"the results of f instead."
            )


class _HasCollectives(Exception):
    """Raised if a device has several rows, and `f` has collectives over rows."""


def _join_whole(
    arguments: AlongAxes, rest: Rest, whole: Arrays
) -> tuple[Callable[..., PyTree], AlongAxes]:
    """`f` and the arguments, with new arrays in place of those that are not mapped."""
    f, leaves = rest.join(whole)
    unmapped = dataclasses.replace(arguments.rest, leaves=leaves)
    return f, dataclasses.replace(arguments, rest=unmapped)


# Rows are padded with copies of the last one, to a multiple of the number of devices. A
# row that is there several times must count once. If the copies were just dropped, they
# would get zero cotangents, and zero times an infinite derivative is NaN. So each of
# them gets an equal share of the cotangent. That needs copies that are alike, and
# derivatives that are linear in the cotangent. If a row can see the rows that it is
# mapped with, its copies have other values and derivatives, and a backward rule of the
# user's need not be linear. Then the copies are dropped.


def padded(x: jax.Array, axis: int, count: int) -> jax.Array:
    """An array with so many copies of its last row after it."""
    last = lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    copies = jnp.broadcast_to(last, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    return lax.concatenate([x, copies], axis)


def without_padding(y: jax.Array, count: int, *, shared: bool = True) -> jax.Array:
    """The array without its last `count` rows, which are copies of the one before.

    >>> y = jnp.array([1.0, 2.0, 2.0])
    >>> jax.vjp(lambda y: without_padding(y, 1), y)[1](jnp.ones(2))[0].tolist()
    [1.0, 0.5, 0.5]
    """
    rows = len(y) - count
    if not (shared and is_inexact(y)):
        return y[:rows]

    @jax.custom_jvp
    def first(y: jax.Array) -> jax.Array:
        return y[:rows]

    @first.defjvp
    def first_jvp(primals: PyTree, tangents: PyTree) -> Value:
        (y,), (t,) = primals, tangents
        mean = jnp.mean(t[rows - 1 :], 0, keepdims=True)
        return first(y), jnp.concatenate([t[: rows - 1], mean])

    return first(y)
