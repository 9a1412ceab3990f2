"""Which axes of arrays are split over which axes of a mesh, and errors about them."""

import math
from collections.abc import Collection, Hashable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._arrays import axes_tree, broadcast_prefix, describe, flatten, is_dynamic, paths
from .._types import PyTree, Value
from ._mesh import SomeMesh, names_in, quoted

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
    """The arrays of a tree and their specifications, by the path of the array.

    Args:
        tree: Any PyTree. Leaves that are not arrays are left out.
        specs: A prefix tree of `jax.sharding.PartitionSpec`.
        axes: The axes of the mesh that specifications may name.
        tree_name: The name of the tree in error messages.
        spec_name: The name of the prefix tree.

    Raises:
        TypeError: If the prefix tree has anything else for an array.
        ValueError: If it is no prefix of the tree, or has more entries than the array
            has axes, or names no axis of the mesh.
    """
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
