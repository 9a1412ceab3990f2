"""The parts of an array's type besides shape and dtype.

Weak types are taken away before arrays enter a loop, and given back afterwards. A
tangent has no weak type and a primitive has to keep its types, so nothing in a loop is
weakly typed. What comes out is weakly typed again where it would be by `jax.lax.scan`,
since under strict promotion the next line of the user's code may depend on it.

Inside `jax.shard_map`, the type of an array says along which axes of the mesh it may
differ between devices. If devices stop a loop at different times, everything that
depends on the number of steps differs, even if it is computed from nothing that does;
the number itself is an example.

On a mesh with explicit axes, the type of an array also says how it is split over
devices. JAX refuses to mix arrays that are split differently, so what a loop makes of a
type, such as a buffer or a zero, has to be split like it. Types with one more axis are
made here and nowhere else.
"""

import contextlib
import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .._types import Aval, BatchAxis, PyTree, Value
from ._partition import as_array, is_dynamic, is_key


def is_type(leaf: object) -> bool:
    """Whether a leaf is the type of an array."""
    return isinstance(leaf, jax.core.ShapedArray)


def has_dtype(x: Any) -> bool:
    """Whether something is an array or the type of one, or of a reference to one."""
    # Numbers of Python, tokens and the types of `hijax` have no dtype.
    return hasattr(x, "dtype")


def type_of(x: object) -> Aval:
    """The type of a value, or the type itself if it is one."""
    return x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)


def lowered_types(aval: Aval) -> list[Aval]:
    """The types of the arrays that a value of a type consists of."""
    return [aval] if has_dtype(aval) else aval.lo_ty()


def types_of(tree: PyTree) -> PyTree:
    """A tree with its arrays reduced to their types, to be kept beyond a trace."""
    return jax.tree.map(lambda x: jax.typeof(x) if is_dynamic(x) else x, tree)


def is_weak(leaf: object) -> bool:
    """Whether an array, a type of one or a Python number is weakly typed."""
    aval = type_of(leaf)
    return has_dtype(aval) and aval.weak_type


def strongly_typed(leaf: Value) -> Value:
    """An array without a weak type."""
    if not is_weak(leaf):
        return leaf
    return lax.convert_element_type(leaf, jax.typeof(leaf).dtype)


def plain(leaf: object) -> jax.Array:
    """An array without a weak type; of PRNG keys, their data."""
    leaf = as_array(leaf)
    return jax.random.key_data(leaf) if is_key(leaf) else strongly_typed(leaf)


def with_weak_types(leaves: Sequence[Value], weak: Sequence[bool]) -> list[Value]:
    """Leaves, some of them weakly typed and the others not; only arrays change."""
    return [
        _with_weakness(leaf, becomes_weak) if isinstance(leaf, jax.Array) else leaf
        for leaf, becomes_weak in zip(leaves, weak, strict=True)
    ]


def _with_weakness(leaf: jax.Array, becomes_weak: bool) -> Value:
    if not becomes_weak:
        return strongly_typed(leaf)
    if is_weak(leaf):
        return leaf
    # `lax.convert_element_type` cannot make weak types.
    return primitives.convert_element_type_p.bind(
        leaf, new_dtype=np.dtype(leaf.dtype), weak_type=True, sharding=None
    )


def where_leading(mask: Value, x: Value, other: Value) -> Value:
    """`x` where a mask of its leading axes holds, and elsewhere the other."""
    if explicit_sharding(x) is not None:
        mask = along(mask, range(mask.ndim), x)
        return jnp.where(mask, x, along(other, range(x.ndim), x))
    shape = mask.shape + (1,) * (x.ndim - mask.ndim)
    return jnp.where(mask.reshape(shape), x, other)


def along(entries: Value, axes: Sequence[int], like: Value) -> Value:
    """An array whose axes are some of those of another one, repeated along the rest."""
    # It is split over devices as the other is: JAX does not select by a mask that is
    # not.
    if (sharding := explicit_sharding(like)) is not None:
        pairs = zip(entries.shape, axes, strict=True)
        spec = [None if size == 1 else sharding.spec[axis] for size, axis in pairs]
        entries = jax.sharding.reshard(entries, PartitionSpec(*spec))
    return lax.broadcast_in_dim(entries, like.shape, axes, out_sharding=sharding)


def axes_of(x: Value) -> frozenset[str]:
    """The axes of devices that an array, or one of this type, differs along."""
    aval = type_of(x)
    return aval.manual_axis_type.varying if is_type(aval) else frozenset()


def vary(x: Value, axes: frozenset[str]) -> Value:
    """An array as one that may differ along some axes."""
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def varying_type(aval: Aval, axes: frozenset[str]) -> Aval:
    """The type of an array of another type that is cast by `vary`."""
    if axes <= axes_of(aval):
        return aval
    (varying,) = jax.make_jaxpr(lambda x: vary(x, axes))(aval).out_avals
    return varying


def explicit_sharding(x: Value) -> NamedSharding | None:
    """How an array, or one of this type, is split over explicit axes of a mesh."""
    # `None` if it is not: an operation that is told of no sharding is the same program
    # with a mesh as without one.
    sharding = type_of(x).sharding
    return sharding if any(sharding.spec) else None


def automatic_sharding(x: Value) -> NamedSharding | None:
    """How an array is split over axes of a mesh that its type does not tell of."""
    # A tracer knows no more than its type.
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if AxisType.Auto in sharding.mesh.axis_types else None


def on_mesh(aval: Aval) -> Aval:
    """The type of what is on the explicit mesh that is set, if there is one."""
    # A number that is made from nothing has no mesh in its type, and JAX refuses to
    # batch what starts from one.
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or not aval.sharding.mesh.empty:
        return aval
    spec = PartitionSpec(*[None] * aval.ndim)
    return aval.update(sharding=NamedSharding(mesh, spec))


def on_mesh_of(values: Iterable[Value]) -> AbstractContextManager[object]:
    """A context in which the explicit mesh of some arrays is set, if none is."""
    # JAX does not ask its users to set the mesh that their arrays are on. Rules for
    # derivatives and batches need it: what they make from nothing, such as a buffer, is
    # put on the mesh that is set.
    if jax.sharding.get_abstract_mesh().empty:
        for value in filter(is_type, map(type_of, values)):
            mesh = value.sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                return jax.sharding.use_abstract_mesh(mesh)
    return contextlib.nullcontext()


def put_on_mesh(x: Value) -> Value:
    """A number that is made from nothing, for a loop that may be batched."""
    aval = jax.typeof(x)
    return placed_as(x, on_mesh(aval))


def placed_as(x: Value, like: Value) -> Value:
    """An array that is on no mesh or not split, as another one of its shape is."""
    here, there = type_of(x).sharding, type_of(like).sharding
    if AxisType.Explicit not in there.mesh.axis_types or any(here.spec):
        return x
    same = here.mesh.empty == there.mesh.empty and not any(there.spec)
    return x if same else jax.sharding.reshard(x, there)


def on_mesh_that_is_set(x: Value, like: Value) -> Value:
    """A cotangent on the explicit mesh that is set, as another array is split."""
    # What a function under `jax.sharding.auto_axes` closes over has a cotangent with
    # the automatic mesh in its type. JAX adds it to no other.
    mesh, here = jax.sharding.get_abstract_mesh(), type_of(x)
    is_foreign = is_type(here) and not here.sharding.mesh.empty
    if not is_foreign or AxisType.Explicit not in mesh.axis_types:
        return x
    same = here.sharding.mesh.axis_types == mesh.axis_types
    return x if same else jax.sharding.reshard(x, type_of(like).sharding.spec)


def changes_mesh(before: Aval, after: Aval) -> bool:
    """Whether one type is on an explicit mesh and the other on an automatic one."""
    old, new = before.sharding.mesh, after.sharding.mesh
    return not (old.empty or new.empty) and old.axis_types != new.axis_types


def mesh_axis_of(x: Value, axis: int) -> Hashable:
    """The explicit axes of a mesh that one axis of an array is split over, if any."""
    return type_of(x).sharding.spec[axis]


def stack_type(
    aval: Aval, size: int, axis: int = 0, mesh_axis: Hashable = None
) -> Aval:
    """The type of `size` values of one type along a new axis."""
    return jex.unmapped_aval(size, axis, aval, mesh_axis)


def batch_type(aval: Aval, axis_data: BatchAxis, dim: int | None = 0) -> Aval:
    """The type of a batch of values of one type; the same if it is not batched."""
    if dim is None:
        return aval
    mesh_axis = axis_data.explicit_mesh_axis
    # What is on no mesh is only put on one to be split: what a function under
    # `jax.sharding.auto_axes` closes over must not be on the explicit one.
    aval = aval if mesh_axis is None else on_mesh(aval)
    return stack_type(aval, axis_data.size, dim, mesh_axis)


def stack_of(x: Value, size: int) -> Value:
    """A buffer of `size` rows, each of them `x`; keeps its sharding and its axes."""
    return lax.broadcast(x, (size,))


def with_batch_axis(x: Value, dim: int | None, axis_data: BatchAxis) -> Value:
    """`x` with its batch axis in front, or with one if it has none."""
    if dim is not None:
        return jnp.moveaxis(x, dim, 0)
    sharding = explicit_sharding(batch_type(jax.typeof(x), axis_data))
    return lax.broadcast(x, (axis_data.size,), out_sharding=sharding)


def nbytes(types: Iterable[Aval]) -> int:
    """The bytes of arrays of these types: on one device, if their types split them."""
    arrays = [lo for aval in types for lo in lowered_types(aval)]
    return sum(math.prod(own_shape(aval)) * aval.dtype.itemsize for aval in arrays)


def own_shape(aval: Aval) -> tuple[int, ...]:
    """The shape of what one device has of an array of this type."""
    is_known = is_type(aval)
    sharding = explicit_sharding(aval) if is_known else automatic_sharding(aval)
    return aval.shape if sharding is None else sharding.shard_shape(aval.shape)
