"""Single layers of a stack, as `equinox.tree_at` looks at them and edits them.

`tree_at(where, stack, new)` calls `where` on the stack, and again on a copy in which a
placeholder holds each leaf. It replaces those nodes of the copy that the second call
returned. A layer is no node of a stack, so each layer that is looked at becomes one
(`_Viewed`). Once JAX puts the edited copy together, what has changed is written into
the arrays of the stack.

Both calls have to return the same leaves. So what is sliced is remembered, for as long
as somebody holds it.
"""

import dataclasses
import functools
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._arrays import as_arrays, flatten, is_dynamic, is_scalar
from .._types import PyTree, Value
from ._stack import Layer, check_alike, with_array_state, with_markers_of

# The numbers of one layer or of several, counted from the first.
Place = int | range


def layers_at(layers: Layer, index: int | slice, depth: int) -> Layer:
    """One layer, or some of them, of those that are stacked."""
    place = range(depth)[index]
    return jax.tree.map(lambda leaf: _taken(leaf, place), layers)


def is_edited(stack: PyTree) -> bool:
    """Whether a stack is the copy that `tree_at` gives to its function."""
    return isinstance(stack.layers, _Viewed) or _has_placeholders(stack.layers)


def as_it_was(stack: Layer) -> Layer:
    """The stack that a copy with placeholders was made of."""
    return jax.tree.map(lambda leaf: leaf.value, stack)


def look_at(stack: PyTree, index: int | slice) -> PyTree:
    """Takes layers of a stack that is being edited, which makes them a node of it."""
    layers, place = stack.layers, range(len(stack))[index]
    known = layers if isinstance(layers, _Viewed) else _Viewed(layers, ())
    for view in known.views:
        if view.place == place:
            return view.node
    before = as_it_was(stack)[index]
    view = _View(place, _Before(before), jax.tree.map(_placeholder(), before))
    # Nobody has this copy but `tree_at`.
    object.__setattr__(stack, "layers", _Viewed(known.layers, (*known.views, view)))
    return view.node


# What becomes of the layers that were looked at.


@dataclasses.dataclass(frozen=True, eq=False)
class _Before:
    """What was looked at, before it was edited. No two of these are equal."""

    node: PyTree


@dataclasses.dataclass(frozen=True)
class _View:
    """A layer, or a stack of some, that was looked at and may have been edited."""

    place: Place
    before: _Before
    node: PyTree


@dataclasses.dataclass(frozen=True)
class _Viewed:
    """The layers of a stack, and beside them those that were looked at."""

    layers: PyTree
    views: tuple[_View, ...]

    def __getattr__(self, name: str) -> Any:
        # Arrays of all layers may be edited together with those of one.
        return getattr(self.layers, name)


def _flatten(viewed: _Viewed) -> tuple[PyTree, PyTree]:
    places = tuple((view.place, view.before) for view in viewed.views)
    return (viewed.layers, *(view.node for view in viewed.views)), places


def _unflatten(places: tuple[tuple[Place, _Before], ...], children: PyTree) -> PyTree:
    layers, *edited = children
    views = [
        _View(place, before, node)
        for (place, before), node in zip(places, edited, strict=True)
    ]
    if _has_placeholders((layers, edited)):
        return _Viewed(layers, tuple(views))
    for view in views:
        layers = _written(layers, view)
    return layers


jax.tree_util.register_pytree_node(_Viewed, _flatten, _unflatten)


def _written(layers: PyTree, view: _View) -> PyTree:
    """The layers, with what is new in those that were looked at."""
    before, after = view.before.node, view.node
    name = f"layers[{_subscript(view.place)}]"
    if not isinstance(view.place, int) and isinstance(after, type(before)):
        before, after = before.layers, after.layers  # whatever its settings are
    after = with_markers_of(before, as_arrays(with_array_state(after)))
    if flatten(after)[1] == flatten(before)[1]:
        after = jax.tree.map(_as_before, before, after)
    check_alike("StackedLayers", before, after, name, "the stack")
    return jax.tree.map(functools.partial(_write, view.place), layers, before, after)


def _write(place: Place, stacked: Value, before: Value, after: Value) -> Value:
    if after is before or not is_dynamic(before):
        return stacked
    return jnp.asarray(stacked).at[_indexer(place)].set(after)


def _as_before(before: Value, after: Value) -> Value:
    """A Python number as an array of the type that it replaces."""
    if is_dynamic(before) and not before.shape and is_scalar(after):
        return jnp.asarray(after, before.dtype)
    return after


def _subscript(place: Place) -> str:
    if isinstance(place, int):
        return str(place)
    return f"{place.start}:{place.stop}" + (f":{place.step}" if place.step > 1 else "")


def _indexer(place: Place) -> int | slice:
    if isinstance(place, int):
        return place
    # Backwards to the first layer: a slice has no number for what is before it.
    return slice(place.start, None if place.stop < 0 else place.stop, place.step)


# The placeholders of Equinox.


@functools.cache
def _placeholder() -> type:
    """The class of what stands for a leaf where `tree_at` asks what to replace."""
    seen: list[type] = []

    def where(leaf: PyTree) -> PyTree:
        seen.append(type(leaf))
        return leaf

    eqx.tree_at(where, 0, 0)
    return seen[-1]


def _has_placeholders(tree: PyTree) -> bool:
    return any(isinstance(leaf, _placeholder()) for leaf in jax.tree.leaves(tree))


# The slices that somebody holds.


@dataclasses.dataclass(frozen=True)
class _Slice:
    """A slice of an array, which is not a slice itself; of a tracer, in one trace.

    Attributes:
        places: Where the slice is along its first axes.
    """

    of: weakref.ref[Any]
    places: tuple[Place, ...]
    trace: object
    result: weakref.ref[Any]


_by_place: dict[tuple[int, tuple[Place, ...]], _Slice] = {}
_by_result: dict[int, _Slice] = {}


def _taken(leaf: Value, place: Place) -> Value:
    """A slice of a leaf: the very same one as before, if it is still there."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: x[_indexer(place)], leaf)
    if not is_dynamic(leaf):
        return leaf
    whole, places = _origin(leaf, place)
    trace = jex.get_opaque_trace_state(convention="eqloop")
    known = _by_place.get((id(whole), places))
    if known is not None and known.of() is whole and known.trace == trace:
        held = known.result()
        if held is not None:
            return held
    result = leaf[_indexer(place)]
    _remember(result, whole, places, trace)
    return result


def _origin(leaf: Value, place: Place) -> tuple[Value, tuple[Place, ...]]:
    """Of what a slice is one, if it is a slice of a slice."""
    known = _by_result.get(id(leaf))
    if known is None or known.result() is not leaf or (whole := known.of()) is None:
        return leaf, (place,)
    *outer, last = known.places
    if isinstance(last, int):  # a stack in a stack
        return whole, (*known.places, place)
    return whole, (*outer, last[_indexer(place)])


def _remember(
    result: Value, whole: Value, places: tuple[Place, ...], trace: object
) -> None:
    at = id(whole), places

    def forget(gone: weakref.ref[Any]) -> None:
        if _by_place.get(at, entry).result is gone:
            _by_place.pop(at, None)
        if _by_result.get(number, entry).result is gone:
            _by_result.pop(number, None)

    number = id(result)
    try:
        entry = _Slice(weakref.ref(whole), places, trace, weakref.ref(result, forget))
    except TypeError:  # a number of NumPy: nothing can refer to it weakly
        return
    _by_place[at] = _by_result[number] = entry
