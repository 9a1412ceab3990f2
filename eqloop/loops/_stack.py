"""Equal layers as one: a module whose arrays have a leading axis, one entry a layer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import (
    Difference,
    as_arrays,
    describe,
    flatten,
    is_dynamic,
    paths,
    same_static,
    structure_differences,
)
from .._types import PyTree, Value
from ._layer_state import Layer, with_array_state, with_markers_of


def stack(owner: str, layers: Sequence[Layer]) -> Layer:
    """Stacks layers that differ only in the values of their arrays.

    Args:
        owner: The name of the transform, for error messages.
        layers: The layers, at least one.

    Raises:
        TypeError: If they differ in structure, or in the type of an array.
        ValueError: If they differ in a leaf that is not an array.
    """
    first, *others = (as_arrays(with_array_state(layer)) for layer in layers)
    others = [with_markers_of(first, other) for other in others]
    for number, other in enumerate(others, start=1):
        _check_alike(owner, first, other, f"layers[{number}]")
    return jax.tree.map(_stack_leaves, first, *others)


def layer_at(layers: Layer, index: Any) -> Layer:
    """One layer, or some of them, of those that are stacked."""
    return jax.tree.map(lambda leaf: leaf[index] if is_dynamic(leaf) else leaf, layers)


def num_layers(owner: str, layers: PyTree) -> int:
    """How many layers are stacked.

    Raises:
        ValueError: If an array has no leading axis, if they have different ones, or if
            there is no array.
    """
    leaves, _ = flatten(layers)
    arrays = {
        path: leaf
        for path, leaf in zip(paths(layers, "layers"), leaves, strict=True)
        if hasattr(leaf, "shape")
    }
    if not arrays:
        raise ValueError(
            f"{owner}: the layers hold no arrays, so it is unknown how many layers "
            f"there are. Call one of them in an `el.Scan` with `length=`."
        )
    if lone := [path for path, leaf in arrays.items() if not leaf.shape]:
        raise ValueError(
            f"{owner}: every array must have a leading axis, with one entry for each "
            f"layer, but these have no axis:\n{_listing(arrays, lone)}\n"
            f"`StackedLayers.init` and `StackedLayers.from_layers` do this."
        )
    lengths = {leaf.shape[0] for leaf in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"{owner}: every array must have a leading axis, with one entry for each "
            f"layer, but these axes differ:\n{_listing(arrays, arrays)}"
        )
    return lengths.pop()


def _listing(arrays: dict[str, Any], which: PyTree) -> str:
    return "\n".join(f"  {path}: {describe(arrays[path])}" for path in which)


# Where layers differ.


def _check_alike(owner: str, first: PyTree, other: PyTree, name: str) -> None:
    lines = [*_structure_lines(first, other, name)] or [
        *_leaf_lines(first, other, name, _types_differ)
    ]
    if lines:
        listing = "\n".join(lines)
        raise TypeError(
            f"{owner}: layers must have the same structure, and arrays of the same "
            f"shapes and dtypes, but these do not:\n{listing}"
        )
    if lines := [*_leaf_lines(first, other, name, _statics_differ)]:
        listing = "\n".join(lines)
        raise ValueError(
            f"{owner}: layers may differ only in the values of their arrays, but these "
            f"differ in other leaves:\n{listing}\nMake them arrays, or make them equal."
        )


def _structure_lines(first: PyTree, other: PyTree, name: str) -> Iterator[str]:
    if flatten(first)[1] == flatten(other)[1]:
        return
    for difference in structure_differences(first, other, name):
        yield _structure_line(difference)


def _structure_line(difference: Difference) -> str:
    path, one, other = difference.path, difference.one, difference.other
    if one == other:
        return f"  {path}: the static fields of the {one} differ from layers[0]"
    return f"  {path}: {other or 'nothing'}, but {one or 'nothing'} in layers[0]"


def _leaf_lines(
    first: PyTree, other: PyTree, name: str, differ: Callable[[PyTree, PyTree], bool]
) -> Iterator[str]:
    leaves = [flatten(layer)[0] for layer in (first, other)]
    for path, one, two in zip(paths(other, name), *leaves, strict=True):
        if differ(one, two):
            yield f"  {path}: {describe(two)}, but {describe(one)} in layers[0]"


def _types_differ(one: Value, other: Value) -> bool:
    if not (is_dynamic(one) and is_dynamic(other)):
        return is_dynamic(one) or is_dynamic(other)
    return one.shape != other.shape or one.dtype != other.dtype


def _statics_differ(one: object, other: object) -> bool:
    return not is_dynamic(one) and not same_static(one, other)


def _stack_leaves(*leaves: PyTree) -> Value:
    return jnp.stack(leaves) if is_dynamic(leaves[0]) else leaves[0]
