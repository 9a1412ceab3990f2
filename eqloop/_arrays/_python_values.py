"""Values of Python and NumPy in the places of arrays: what they are, and what to do.

Each leaf that is no array is the same for every step of a loop. Who passes a list of
numbers, or something to iterate over, means its items, and is told how to pass these.
"""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._types import PyTree, Value
from ._partition import describe, is_scalar, listing

_KINDS = (np.number, np.bool)


class _PythonValue(NamedTuple):
    """A value that is no array.

    Attributes:
        size: How many items it has, if it has any.
    """

    words: str
    instead: str
    size: int | None = None


def refuse_python_values(
    owner: str,
    tree: PyTree,
    name: str,
    length: Value,
    length_name: str,
    several: bool = False,
) -> None:
    """Checks that something without an array is not meant as what a loop goes along."""
    # If the length was given, only what has as many items is meant.
    parts = {f"{name}[{i}]": x for i, x in enumerate(tree)} if several else {name: tree}
    found = {k: v for n, x in parts.items() for k, v in _found(x, n, length_name)}
    if length is not None:
        found = {path: value for path, value in found.items() if value.size == length}
    if found:
        listing = "\n".join(f"  {path}: {value.words}" for path, value in found.items())
        advice = " ".join(dict.fromkeys(value.instead for value in found.values()))
        raise TypeError(
            f"{owner}: a loop goes along the axes of arrays, and there is none here. "
            f"Each step would be given the whole of\n{listing}\n{advice}"
        )


def refuse_foreign_arrays(owner: str, tree: PyTree, name: str) -> None:
    """Checks that no array is of text, of dates or of objects."""
    is_foreign = lambda x: isinstance(x, np.ndarray) and not _is_numeric(x)
    if found := listing(tree, name, is_foreign):
        raise TypeError(
            f"{owner}: arrays must hold numbers, but these hold text, dates or other "
            f"objects of Python:\n{found}\nMake numbers of them, such as indices "
            f"into a list (`numpy.unique(x, return_inverse=True)[1]`), or leave them "
            f"out."
        )


def _is_numeric(x: np.ndarray) -> bool:
    is_zero_tangent = x.dtype == jax.dtypes.float0
    return is_zero_tangent or any(jnp.issubdtype(x.dtype, k) for k in _KINDS)


def _found(
    tree: PyTree, name: str, length_name: str
) -> Iterator[tuple[str, _PythonValue]]:
    """What is in a tree, a list of numbers as a whole."""

    def is_list(node: Any) -> bool:
        return (
            type(node) in (list, tuple) and len(node) > 0 and all(map(is_scalar, node))
        )

    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=is_list)[0]:
        whole = name + jtu.keystr(path)
        yield whole, _in_words(node, whole, length_name)


def _in_words(node: Any, path: str, length_name: str) -> _PythonValue:
    kind = type(node).__name__
    if type(node) in (list, tuple, range):
        numbers = f"a {kind} of {len(node)} Python numbers"
        words = repr(node) if kind == "range" else numbers
        return _PythonValue(words, f"Pass an array: `jnp.asarray({path})`.", len(node))
    if is_scalar(node):
        instead = "Pass an array, along whose first axis the loop goes."
        if type(node) is int and length_name == "length":
            instead = (
                f"For {node} steps without anything to scan, give the loop "
                f"`length={node}` and no `xs`; otherwise pass an array."
            )
        return _PythonValue(f"the number {node}", instead)
    if isinstance(node, Iterable) and not isinstance(node, str | bytes | np.ndarray):
        instead = (
            f"Stack the items: `jnp.stack(list({path}))`. If they do not fit into "
            f"memory, use `el.Resumable` with a function that reads them, or go over "
            f"them in Python, and scan over each batch."
        )
        size = len(node) if isinstance(node, Sized) else None
        return _PythonValue(f"{describe(node)}, of type {kind}", instead, size)
    text = f"{describe(node)}, of type {kind}"
    return _PythonValue(text, "Pass arrays, along whose first axes the loop goes.")
