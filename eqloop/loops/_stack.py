"""Equal layers as one: a module whose arrays have a leading axis, one entry a layer.

Their state is stacked as well, under one `StateIndex` for all layers. See
[`equinox.nn.State`][]: a dictionary from the markers of `StateIndex`es to values.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import (
    as_arrays,
    describe,
    flatten,
    is_dynamic,
    paths,
    same_static,
    structure_bits,
    structure_differences,
)
from .._types import PyTree, Value

# A layer, or a stack of them as one tree.
Layer = TypeVar("Layer")


def stack(owner: str, layers: Sequence[Layer], instead: str = "") -> Layer:
    """Stacks layers that differ only in the values of their arrays."""
    first, *others = (as_arrays(with_array_state(layer)) for layer in layers)
    others = [with_markers_of(first, other) for other in others]
    for number, other in enumerate(others, start=1):
        check_alike(owner, first, other, f"layers[{number}]", "layers[0]", instead)
    stacked = lambda *xs: jnp.stack(xs) if is_dynamic(xs[0]) else xs[0]
    return jax.tree.map(stacked, first, *others)


def has_arrays(layers: PyTree) -> bool:
    """Whether there are arrays among the leaves, or types of some."""
    return any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(layers))


@dataclasses.dataclass(frozen=True, eq=False)
class Depth:
    """How many layers there were when they were stacked."""

    # It is a static field, and all of these are equal: stacks of several depths have
    # the same structure, as they have other arrays.

    number: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Depth)

    def __hash__(self) -> int:
        return hash(Depth)


def num_layers(owner: str, layers: PyTree) -> int:
    """How many layers are stacked."""
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
            f"`StackedLayers.init` and `StackedLayers.from_layers` do this, and so "
            f"does `eqx.filter_vmap(make)(keys)`."
        )
    lengths = {leaf.shape[0] for leaf in arrays.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"{owner}: every array must have a leading axis, with one entry for each "
            f"layer, but these axes differ:\n{_listing(arrays, arrays)}\n"
            f"`StackedLayers.init(make, depth, key=key)` makes such layers, and so "
            f"does `eqx.filter_vmap(make)(keys)`. `StackedLayers.from_layers` stacks "
            f"those that there are."
        )
    return lengths.pop()


def _listing(arrays: dict[str, Any], which: PyTree) -> str:
    return "\n".join(f"  {path}: {describe(arrays[path])}" for path in which)


# Where layers differ.


def check_alike(
    owner: str,
    first: PyTree,
    other: PyTree,
    name: str,
    first_name: str,
    instead: str = "",
) -> None:
    """Raises if one layer could not be stacked with another, `first`."""
    names = name, first_name
    lines = [*_structure_lines(first, other, *names)] or [
        *_leaf_lines(first, other, *names, _types_differ)
    ]
    if lines:
        listing = "\n".join(lines)
        raise TypeError(
            f"{owner}: layers must have the same structure, and arrays of the same "
            f"shapes and dtypes, but these do not:\n{listing}{instead}"
        )
    differ = lambda one, two: not (is_dynamic(one) or same_static(one, two))
    if lines := [*_leaf_lines(first, other, *names, differ)]:
        listing = "\n".join(lines)
        raise ValueError(
            f"{owner}: layers may differ only in the values of their arrays, but these "
            f"differ in other leaves:\n{listing}\nMake them arrays, or make them equal."
        )


def _structure_lines(
    first: PyTree, other: PyTree, name: str, first_name: str
) -> Iterator[str]:
    if structure_bits(flatten(first)[1]) == structure_bits(flatten(other)[1]):
        return
    for d in structure_differences(first, other, name):
        if d.one == d.other:
            what = f"the static fields of the {d.one} differ from {first_name}"
            yield f"  {d.path}: {what}"
        else:
            what, like = d.other or "nothing", d.one or "nothing"
            yield f"  {d.path}: {what}, but {like} in {first_name}"


def _leaf_lines(
    first: PyTree,
    other: PyTree,
    name: str,
    first_name: str,
    differ: Callable[[PyTree, PyTree], bool],
) -> Iterator[str]:
    leaves = [flatten(layer)[0] for layer in (first, other)]
    for path, one, two in zip(paths(other, name), *leaves, strict=True):
        if differ(one, two):
            yield f"  {path}: {describe(two)}, but {describe(one)} in {first_name}"


def _types_differ(one: Value, other: Value) -> bool:
    if not (is_dynamic(one) and is_dynamic(other)):
        return is_dynamic(one) or is_dynamic(other)
    return one.shape != other.shape or one.dtype != other.dtype


# The state of layers.


def layers_at(layers: Layer, index: int | slice) -> Layer:
    """One layer, or some of them, of those that are stacked."""
    taken = lambda leaf: leaf[index] if is_dynamic(leaf) else leaf
    return jax.tree.map(
        lambda leaf: (
            eqx.filter_eval_shape(taken, leaf)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else taken(leaf)
        ),
        layers,
    )


def with_array_state(layer: Layer) -> Layer:
    """A layer whose initial state consists of arrays, so that it can be stacked."""

    def convert(node: PyTree) -> PyTree:
        if not _is_index(node):
            return node
        return _with_init(node, as_arrays(node.init, scalars=True))

    return jax.tree.map(convert, layer, is_leaf=_is_index)


def with_markers_of(first: PyTree, layer: Layer) -> Layer:
    """A layer whose states have the names of those of the first layer."""
    names = iter(filter(_is_index, jax.tree.leaves(first, is_leaf=_is_index)))

    def rename(node: PyTree) -> PyTree:
        if not _is_index(node):
            return node
        return _with_init(next(names, node), node.init)

    return jax.tree.map(rename, layer, is_leaf=_is_index)


def state_of(
    owner: str, layers: PyTree, state: eqx.nn.State, depth: int
) -> eqx.nn.State:
    """The part of a state that belongs to the layers."""
    try:
        part = state.substate(layers)
    except KeyError as error:
        raise ValueError(
            f"{owner}: the state holds nothing for {error}, which is in the layers. "
            f"Pass the state that `eqx.nn.make_with_state` made of the model that they "
            f"are part of."
        ) from None
    if any(jnp.shape(leaf)[:1] != (depth,) for leaf in jax.tree.leaves(part)):
        raise ValueError(
            f"{owner}: the arrays of the state must have an entry for each of the "
            f"{depth} layers, along a leading axis, but it is\n"
            f"  {eqx.tree_pformat(part)}\nThe state of a few of the layers is "
            f"`jax.tree.map(lambda leaf: leaf[few], state.substate(layers))`."
        )
    return part


def check_returned(owner: str, out: PyTree) -> tuple[PyTree, eqx.nn.State]:
    """The `x` and the state that a layer returned."""
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], eqx.nn.State):
        return out
    raise TypeError(
        f"{owner}: a layer that is given a state must return `(x, state)`, but it "
        f"returned {eqx.tree_pformat(out)}."
    )


def _is_index(node: object) -> bool:
    return isinstance(node, eqx.nn.StateIndex)


def _with_init(index: Value, init: PyTree) -> PyTree:
    if not jax.tree.leaves(init):  # it has been taken out, see `delete_init_state`
        return index
    return eqx.tree_at(lambda index: index.init, index, init)
