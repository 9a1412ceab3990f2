"""Which axis of which array is split over which axes of a mesh, and what is wrong."""

import math
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._axes import axes_tree, broadcast_prefix
from .._partition import describe, flatten, is_dynamic, paths
from ._mesh import SomeMesh, names_in, quoted


def resolve_specs(
    name: str,
    tree: Any,
    specs: Any,
    axes: Collection[Any],
    *,
    tree_name: str,
    spec_name: str,
) -> dict[str, tuple[Any, PartitionSpec]]:
    """The arrays of a tree and their specifications, by the path of the array.

    Args:
        name: The name of the transform, for error messages.
        tree: Any PyTree. Leaves of it that are no arrays are left out.
        specs: A prefix tree of `jax.sharding.PartitionSpec`.
        axes: The axes of the mesh that they may name.
        tree_name: What the tree is called in error messages.
        spec_name: What the prefix tree is called.

    Raises:
        TypeError: If the prefix tree has anything else for an array.
        ValueError: If it is no prefix of the tree, or has more entries than the array
            has axes, or names no axis of the mesh.
    """
    prefix = broadcast_prefix(
        axes_tree(specs), tree, tree_name, spec_name, noun="PartitionSpec"
    )
    resolved = {}
    for path, leaf, (spec, spec_path) in zip(
        paths(tree, tree_name), flatten(tree)[0], prefix, strict=True
    ):
        if is_dynamic(leaf):
            _check(name, path, leaf, spec, spec_path, axes)
            resolved[path] = leaf, spec
    return resolved


def check_even(
    name: str, resolved: dict[str, tuple[Any, PartitionSpec]], mesh: SomeMesh
) -> None:
    """Sees to it that the devices divide every axis that is split over them."""
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
            f"{name}: these axes cannot be split evenly over the devices:\n{listing}\n"
            f"Change their sizes, or use `ParallelMap`, which takes any length."
        )


def check_replicated(
    name: str, resolved: dict[str, tuple[Any, PartitionSpec]], axes: Collection[Any]
) -> None:
    """Sees to it that what differs between devices is split over them."""
    wrong = []
    for path, (leaf, spec) in resolved.items():
        varying = jax.typeof(leaf).mat.varying & set(axes)
        if unnamed := varying - set(names_in(spec)):
            wrong.append(f"  {path}: {spec}, but it differs along {quoted(unnamed)}")
    if wrong:
        listing = "\n".join(wrong)
        raise ValueError(
            f"{name}: out_specs give these results as the same along an axis of the "
            f"mesh along which they may differ:\n{listing}\nName that axis in "
            f"out_specs, or reduce over it in f, with `jax.lax.psum` for example. If "
            f"they are the same and JAX does not know, pass `check_vma=False`."
        )


def _check(
    name: str, path: str, leaf: Any, spec: Any, spec_path: str, axes: Any
) -> None:
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"{name}: {spec_path} must be a jax.sharding.PartitionSpec, but for {path} "
            f"it is {spec!r}, of type {type(spec).__name__}. `PartitionSpec()` is for "
            f"what is whole on every device."
        )
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"{name}: {spec_path}={spec} has {len(spec)} entries, but {path} is "
            f"{describe(leaf)} and has {leaf.ndim} axes. To stack numbers of the "
            f"devices, give them an axis of size 1 first."
        )
    if unknown := [entry for entry in names_in(spec) if entry not in axes]:
        raise ValueError(
            f"{name}: {spec_path}={spec}, for {path}, names {quoted(unknown)}, but the "
            f"axes to split over are {quoted(axes)}."
        )
