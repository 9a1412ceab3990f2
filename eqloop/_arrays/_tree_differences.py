"""Where two trees differ: the paths, and what each tree has there, in words.

How a difference is reported is up to the caller.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu

from .._types import PyTree
from ._bits import structure_bits
from ._partition import describe, same_static


@dataclasses.dataclass(frozen=True)
class Difference:
    """A place at which two trees are not the same.

    Attributes:
        one: What the one tree has there, in words; `None` if it has no such place.
        other: What the other has there. Both are the same words where it is the static
            fields of a node that differ: those which do, as far as they are known, are
            the differences that follow.
    """

    path: str
    one: str | None
    other: str | None


def structure_differences(
    one: PyTree, other: PyTree, path: str
) -> Iterator[Difference]:
    """Where the structures of two trees part, from the top down.

    >>> list(structure_differences({"a": 0}, {"a": [1]}, "tree"))
    [Difference(path="tree['a']", one='0', other='list of 1')]
    """
    if _is_leaf(one) and _is_leaf(other):
        return
    if type(one) is not type(other):
        yield Difference(path, kind(one), kind(other))
        return
    children, others = _children(one), _children(other)
    for key in children | others:
        if key not in others:
            yield Difference(path + key, kind(children[key]), None)
        elif key not in children:
            yield Difference(path + key, None, kind(others[key]))
        else:
            yield from structure_differences(children[key], others[key], path + key)
    is_other = structure_bits(_shallow(one)) != structure_bits(_shallow(other))
    if children.keys() == others.keys() and is_other:
        yield from _static_differences(one, other, path)


def prefix_difference(
    prefix: PyTree, tree: PyTree, path: str, other_path: str
) -> str | None:
    """Where a prefix tree first parts from a tree, in words; `None` if it is one.

    >>> prefix_difference({"a": [0, 1]}, {"a": 2.0}, "in_axes", "xs")
    "in_axes['a'] is a list of 2, where xs['a'] is 2.0"
    """
    if _is_leaf(prefix):
        return None
    children, others = _children(prefix), _children(tree)
    if type(prefix) is not type(tree):
        there = kind(tree) if _is_leaf(tree) else f"a {kind(tree)}"
        return f"{path} is a {kind(prefix)}, where {other_path} is {there}"
    for key in children | others:
        if key not in others:
            return f"{path} has {key}, and {other_path} has not"
        if key not in children:
            return f"{path} has no {key}, and {other_path} has one"
        below = path + key, other_path + key
        if found := prefix_difference(children[key], others[key], *below):
            return found
    if _shallow(prefix) != _shallow(tree):
        return f"{path} and {other_path} are each a {kind(tree)}, but differ in it"
    return None


def kind(node: object) -> str:
    """A node or a leaf in words: its type, or as `describe` has it."""
    if _is_leaf(node):
        return describe(node)
    if isinstance(node, tuple | list | dict) and not hasattr(node, "_fields"):
        return f"{type(node).__name__} of {len(node)}"
    return type(node).__name__


def _static_differences(one: PyTree, other: PyTree, path: str) -> Iterator[Difference]:
    yield Difference(path, kind(one), kind(other))
    for field in dataclasses.fields(one) if dataclasses.is_dataclass(one) else ():
        values = [getattr(node, field.name, None) for node in (one, other)]
        if field.metadata.get("static") and not same_static(*values):
            yield Difference(f"{path}.{field.name}", *map(describe, values))


def _children(node: PyTree) -> dict[str, Any]:
    pairs, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return {jtu.keystr(path): child for path, child in pairs}


def _shallow(node: PyTree) -> Any:
    return jtu.tree_structure(node, is_leaf=lambda x: x is not node)


def _is_leaf(node: object) -> bool:
    return node is None or jtu.all_leaves([node])
