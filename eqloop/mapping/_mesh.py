"""Meshes: which one a map runs on, along which axes, and where arrays have to be.

And the specifications that say which axes of arrays are split over which axes of a
mesh, with the errors about them.
"""

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._arrays import axes_tree, broadcast_prefix, describe, flatten, is_dynamic, paths
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
    """Puts arrays where a map over all axes of a mesh reads them."""
    # JAX itself moves arrays that were computed on the default device. It does not move
    # arrays that were put on another device, or whose types, in an explicit mesh, say
    # that they are elsewhere.
    if set(free_axes(mesh)) != set(mesh.axis_names):
        return list(leaves)  # an enclosing map has placed them
    return [_placed(leaf, mesh, spec) for leaf, spec in zip(leaves, specs, strict=True)]


def are_movable(mesh: SomeMesh | None, tree: PyTree) -> bool:
    """Whether a program on a mesh can take the arrays of a tree from where they are."""
    # JAX moves an array unless it was put on a device explicitly (`committed`).
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


# Specifications.

# By the path of an array: the array, and its specification.
Resolved = dict[str, tuple[Any, PartitionSpec]]


def resolve_specs(
    tree: PyTree,
    specs: PyTree,
    axes: Collection[Hashable],
    *,
    tree_name: str,
    spec_name: str,
) -> Resolved:
    """The arrays of a tree and their specifications, by the path of the array."""
    prefix = broadcast_prefix(
        "ShardMap", axes_tree(specs), tree, tree_name, spec_name, noun="PartitionSpec"
    )
    resolved: Resolved = {}
    for path, leaf, (spec, spec_path) in zip(
        paths(tree, tree_name), flatten(tree)[0], prefix, strict=True
    ):
        if is_dynamic(leaf):
            _check_spec(path, leaf, spec, spec_path, axes)
            resolved[path] = leaf, spec
    return resolved


def check_even(resolved: Resolved, mesh: SomeMesh) -> None:
    """Checks that axes that are split over devices are multiples of their number."""
    uneven = []
    for path, (leaf, spec) in resolved.items():
        for axis, entry in enumerate(spec):
            names = names_in(PartitionSpec(entry))
            parts = math.prod(mesh.shape[name] for name in names)
            if leaf.shape[axis] % parts:
                uneven.append(
                    f"  {path}: {describe(leaf)}, axis {axis} in {parts} parts along "
                    f"{quoted(names)}"
                )
    if uneven:
        listing = "\n".join(uneven)
        raise ValueError(
            f"ShardMap: these axes cannot be split evenly over the devices:\n"
            f"{listing}\nChange their sizes, or use `ParallelMap`, which takes any "
            f"length."
        )


def check_replicated(resolved: Resolved, axes: Collection[Hashable]) -> None:
    """Checks that results that may differ between devices are split over them."""
    wrong = []
    for path, (leaf, spec) in resolved.items():
        varying = jax.typeof(leaf).mat.varying & set(axes)
        if unnamed := varying - set(names_in(spec)):
            wrong.append(f"  {path}: {spec}, but it differs along {quoted(unnamed)}")
    if wrong:
        listing = "\n".join(wrong)
        raise ValueError(
            f"ShardMap: out_specs give these results as the same along an axis of the "
            f"mesh along which they may differ:\n{listing}\nName that axis in "
            f"out_specs, or reduce over it in f, with `jax.lax.psum` for example. If "
            f"they are the same and JAX does not know, pass `check_vma=False`."
        )


def _check_spec(
    path: str, leaf: Value, spec: PyTree, spec_path: str, axes: PyTree
) -> None:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"ShardMap: {spec_path} must be a jax.sharding.PartitionSpec, but for "
            f"{path} it is {spec!r}, of type {type(spec).__name__}. `PartitionSpec()` "
            f"is for an array that every device holds whole."
        )
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"ShardMap: {spec_path}={spec} has {len(spec)} entries, but {path} is "
            f"{describe(leaf)} and has {leaf.ndim} axes. Give it fewer entries, or the "
            f"array more axes: `{path}[None]` has one of size 1."
        )
    if unknown := [entry for entry in names_in(spec) if entry not in axes]:
        raise ValueError(
            f"ShardMap: {spec_path}={spec}, for {path}, names {quoted(unknown)}, but "
            f"the axes to split over are {quoted(axes)}."
        )
