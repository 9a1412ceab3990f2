"""Meshes: which one a map runs on, along which axes, and where arrays have to be."""

from collections.abc import Collection, Hashable, Sequence

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._types import PyTree, Value

Specs = Sequence[PartitionSpec]
SomeMesh = Mesh | AbstractMesh


def check_mesh(name: str, mesh: object) -> None:
    """Checks that the setting `mesh` is a mesh or `None`."""
    if not isinstance(mesh, SomeMesh | None):
        raise TypeError(
            f"{name}: `mesh` must be a jax.sharding.Mesh, or None for that of "
            f"`jax.set_mesh`, but it is {mesh!r}, of type {type(mesh).__name__}."
        )


def current_mesh() -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def free_axes(mesh: SomeMesh) -> tuple[Hashable, ...]:
    """The axes of a mesh that no enclosing `shard_map` has split already."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(name for name in mesh.axis_names if name not in mapped)


def place(leaves: Sequence[Value], mesh: SomeMesh, specs: Specs) -> list[Value]:
    """Puts arrays where a map over all axes of a mesh reads them.

    JAX itself moves arrays that were computed on the default device. It does not move
    arrays that were put on another device, or whose types, in an explicit mesh, say
    that they are elsewhere.
    """
    if set(free_axes(mesh)) != set(mesh.axis_names):
        return list(leaves)  # an enclosing map has placed them
    return [_placed(leaf, mesh, spec) for leaf, spec in zip(leaves, specs, strict=True)]


def are_movable(mesh: SomeMesh | None, tree: PyTree) -> bool:
    """Whether a program on a mesh can take the arrays of a tree from where they are.

    JAX moves an array unless it was put on a device explicitly (`committed`).
    """
    return mesh is not None and all(
        _is_movable(leaf, mesh)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    )


def _is_movable(leaf: jax.Array, mesh: SomeMesh) -> bool:
    devices = leaf.sharding.device_set
    is_there = (
        devices == set(mesh.devices.flat)
        if isinstance(mesh, Mesh)
        else len(devices) == mesh.size
    )
    return is_there or not leaf.committed


def constrained(leaf: Value, mesh: SomeMesh, spec: PartitionSpec) -> Value:
    """Tells the compiler how an array is split; it may split other axes as it likes."""
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(leaf, _target(mesh, spec))
    free = PartitionSpec.UNCONSTRAINED
    entries = [*spec, *[None] * (leaf.ndim - len(spec))]
    spec = PartitionSpec(*[free if entry is None else entry for entry in entries])
    return jax.lax.with_sharding_constraint(leaf, _target(mesh, spec))


def _placed(leaf: Value, mesh: SomeMesh, spec: PartitionSpec) -> Value:
    if not isinstance(leaf, jax.core.Tracer):
        return jax.device_put(leaf, _target(mesh, spec))
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(leaf, _target(mesh, spec))
    # Under `jax.vmap`, `device_put` would split the axis of the batch; transposed, it
    # would put the cotangent on one device, in a program that runs on many.
    return leaf


def _target(mesh: SomeMesh, spec: PartitionSpec) -> NamedSharding | PartitionSpec:
    # JAX looks for the devices of an abstract mesh in `jax.set_mesh`.
    return NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec


def names_in(spec: PartitionSpec) -> list[str]:
    """The axes of the mesh that a specification mentions.

    >>> names_in(PartitionSpec(("data", "model"), None))
    ['data', 'model']
    """
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [name for entry in entries for name in entry if name is not None]


def quoted(names: Collection[Hashable]) -> str:
    """Names for an error message, in an order that does not change."""
    return ", ".join(sorted(map(repr, names)))
