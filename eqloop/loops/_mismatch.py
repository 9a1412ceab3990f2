"""How two carries differ, in words: one line for each place.

Of the carry that came out of a step, only the types of the arrays are needed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .._partition import describe, is_dynamic, is_scalar, same_static

# The path of a leaf, what came in, and what came out.
Change = tuple[str, Any, Any]


def is_type(leaf: Any) -> bool:
    """Whether a leaf is the type of an array."""
    return isinstance(leaf, jax.core.ShapedArray)


def type_changes(leaves: Sequence[Change]) -> list[str]:
    """The leaves whose type changed, or that are arrays only before or only after."""
    return [line for leaf in leaves if (line := _type_change(*leaf))]


def static_changes(leaves: Sequence[Change]) -> list[str]:
    """The leaves that are no arrays, and are not the same after as they were before."""
    return [
        _line(name, before, after)
        for name, before, after in leaves
        if not is_dynamic(before) and not same_static(before, after)
    ]


def structure_changes(before: Any, after: Any, name: str) -> list[str]:
    """Where two trees of different structure part, from the top down."""
    return list(_structure_changes(before, after, name))


def _line(name: str, before: Any, after: Any) -> str:
    return f"  {name}: {_kind(before)} came in, {_kind(after)} came out"


def _type_change(name: str, before: Any, after: Any) -> str | None:
    if is_dynamic(before) and is_scalar(after):
        after = jax.typeof(jnp.asarray(after))
    if not is_dynamic(before) and not is_type(after):
        return None
    line = _line(name, before, after)
    if not (is_dynamic(before) and is_type(after)) or before.shape != after.shape:
        return line
    if before.dtype != after.dtype:
        return f"{line} (cast it with .astype, or start from {_article(after.dtype)})"
    return None


def _article(dtype: Any) -> str:
    return f"{'an' if str(dtype)[0] in 'aeiou' else 'a'} {dtype}"


def _structure_changes(before: Any, after: Any, name: str) -> Iterator[str]:
    if _is_leaf(before) and _is_leaf(after):
        return
    if type(before) is not type(after):
        yield _line(name, before, after)
        return
    children_before, children_after = _children(before), _children(after)
    for key in children_before | children_after:
        if key not in children_after:
            yield f"  {name}{key} came in, but did not come out"
        elif key not in children_before:
            yield f"  {name}{key} came out, but had not come in"
        else:
            yield from _structure_changes(
                children_before[key], children_after[key], name + key
            )
    if children_before.keys() == children_after.keys():
        shallow = lambda tree: jtu.tree_structure(tree, is_leaf=lambda x: x is not tree)
        if shallow(before) != shallow(after):
            yield from _static_field_changes(before, after, name)


def _static_field_changes(before: Any, after: Any, name: str) -> Iterator[str]:
    yield f"  {name}: the static fields of the {type(before).__name__} changed"
    for field in dataclasses.fields(before) if dataclasses.is_dataclass(before) else ():
        values = [getattr(node, field.name, None) for node in (before, after)]
        if field.metadata.get("static") and not same_static(*values):
            yield _line(f"{name}.{field.name}", *values)


def _children(node: Any) -> dict[str, Any]:
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {jtu.keystr(path): child for path, child in pairs}


def _is_leaf(node: Any) -> bool:
    return node is None or jtu.all_leaves([node])


def _kind(node: Any) -> str:
    if _is_leaf(node):
        return describe(node)
    if isinstance(node, tuple | list | dict) and not hasattr(node, "_fields"):
        return f"{type(node).__name__} of {len(node)}"
    return type(node).__name__
