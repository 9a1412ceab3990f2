"""The state of stacked layers: one `StateIndex` for all, and what is under it stacked.

See [`equinox.nn.State`][]: a dictionary from the markers of `StateIndex`es to values.
"""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import as_arrays
from .._types import PyTree, Value

# A layer, or a stack of them as one tree.
Layer = TypeVar("Layer")


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
    """The part of a state that belongs to the layers.

    Raises:
        ValueError: If it does not hold the states of this many layers.
    """
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
