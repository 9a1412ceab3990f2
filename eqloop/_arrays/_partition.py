"""Leaves: telling arrays from others, and taking trees and lists of leaves apart.

A leaf is dynamic if it is an array (a JAX array, which includes PRNG keys and tracers,
a NumPy array or a NumPy scalar); any other is static. `None` counts as a static leaf
here, so that a `None` that turns into an array is not taken for a change of structure.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._compat import MARKED_NUMBERS
from .._types import PyTree, Value
from ._bits import bits, structure_bits

Arrays: TypeAlias = Sequence[Value]
Flags: TypeAlias = tuple[bool, ...]

_Leaf = TypeVar("_Leaf")


def is_dynamic(leaf: object) -> bool:
    """Whether a leaf flows through a transform as an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_typed(leaf: object) -> bool:
    """Whether a leaf is such an array, or a type that stands for one."""
    return is_dynamic(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_scalar(leaf: object) -> bool:
    """Whether a leaf is a Python number: static or dynamic as the context has it."""
    # Not `isinstance`: nobody wants an `enum.IntEnum` to be traced.
    return type(leaf) in (bool, int, float, complex) or type(leaf) in MARKED_NUMBERS


def is_inexact_scalar(leaf: object) -> bool:
    """Whether a leaf is a Python number that is no integer."""
    return is_scalar(leaf) and isinstance(leaf, float | complex)


def is_key(x: Value) -> bool:
    """Whether an array, or one of this type, is one of PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def axes_of_keys(x: Value) -> int | None:
    """How many axes of keys an array has; `None` if it is none of keys, old or new."""
    if is_key(x):
        return x.ndim
    return x.ndim - 1 if x.dtype == jnp.uint32 else None


def unmarked(leaf: Value) -> Value:
    """A leaf; as a plain number of Python, if it is one to which JAX added a dtype."""
    kind = MARKED_NUMBERS.get(type(leaf))
    return leaf if kind is None else kind(leaf)


def as_arrays(tree: PyTree, *, scalars: bool = False) -> PyTree:
    """Turns the dynamic leaves of a tree into JAX arrays, and leaves the others be."""

    def convert(leaf: PyTree) -> PyTree:
        becomes_array = is_dynamic(leaf) or (scalars and is_scalar(leaf))
        return as_array(leaf) if becomes_array else leaf

    return jax.tree.map(convert, tree)


def as_array(leaf: Value) -> jax.Array:
    """A leaf as a JAX array; the very same object if it is one."""
    # `jnp.asarray` copies a tracer, and a gradient taken outside of `jit` would keep
    # the copy alive.
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def same_static(before: object, after: object) -> bool:
    """Whether two static leaves are the very same value.

    >>> same_static(float("nan"), float("nan")), same_static(1, 1.0)
    (True, False)
    """
    before, after = unmarked(before), unmarked(after)
    if before is after:
        return True
    try:
        return bits(before) == bits(after)
    except Exception:  # a type whose `==` has no truth value: only identity is sure
        return False


def flatten(tree: PyTree) -> tuple[list[Value], Any]:
    """`jax.tree.flatten` for which `None` is a leaf."""
    return jtu.tree_flatten(tree, is_leaf=_is_none)


def paths(tree: PyTree, name: str) -> list[str]:
    """The name of every leaf, as one would write it in Python.

    >>> paths({"h": (1, None)}, "carry")
    ["carry['h'][0]", "carry['h'][1]"]
    """
    leaves, _ = jtu.tree_flatten_with_path(tree, is_leaf=_is_none)
    return [name + jtu.keystr(path) for path, _ in leaves]


@dataclasses.dataclass(frozen=True)
class Rest:
    """What is left of a tree when some of its leaves are taken out by `partition`."""

    treedef: Any
    leaves: tuple[Value, ...]
    taken: tuple[bool, ...]

    def join(self, taken: Sequence[Value]) -> PyTree:
        """Puts leaves in the places of those that were taken out."""
        return jtu.tree_unflatten(self.treedef, put(self.leaves, self.taken, taken))


def partition(
    tree: PyTree, take: Callable[[PyTree], bool] | Sequence[bool] = is_dynamic
) -> tuple[list[Value], Rest]:
    """Takes leaves out of a tree: its arrays, if nothing else is said.

    >>> taken, rest = partition({"a": jnp.zeros(()), "b": "static"})
    >>> taken, rest.join([2])
    ([Array(0., dtype=float32)], {'a': 2, 'b': 'static'})
    """
    leaves, treedef = flatten(tree)
    taken = tuple(map(take, leaves)) if callable(take) else tuple(take)
    left = put(leaves, taken, [None] * sum(taken))
    return pick(leaves, taken), Rest(treedef, tuple(left), taken)


@jtu.register_static
@dataclasses.dataclass(frozen=True)
class StaticTree:
    """What is left of a tree without its arrays, told from others by its bits.

    Attributes:
        identity: What tells it from others, also from equal ones: 1 is not 1.0.
    """

    rest: Rest = dataclasses.field(compare=False)
    identity: Hashable

    @classmethod
    def of(
        cls,
        tree: PyTree,
        take: Callable[[PyTree], bool] = is_typed,
        identity_of: Callable[[Value], Hashable] = bits,
    ) -> tuple[list[Value], "StaticTree"]:
        """What is taken out of a tree, arrays and types by default, and the rest."""
        arrays, rest = partition(tree, take)
        leaves = tuple(map(identity_of, rest.leaves))
        return arrays, cls(rest, (structure_bits(rest.treedef), rest.taken, leaves))


def describe(leaf: Value) -> str:
    """A leaf for an error message: the dtype and shape of an array, or else the value.

    >>> describe(jnp.zeros((2, 3))), describe("relu")
    ('float32[2,3]', "'relu'")
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    text = repr(unmarked(leaf))
    return text if len(text) <= 60 else f"{text[:57]}..."


def listing(
    tree: PyTree,
    name: str,
    which: Callable[[Value], bool],
    words: Callable[[Value], str] = describe,
) -> str:
    """Some leaves of a tree for an error message, each in a line."""
    named = zip(paths(tree, name), flatten(tree)[0], strict=True)
    return "\n".join(f"  {path}: {words(leaf)}" for path, leaf in named if which(leaf))


def _is_none(node: object) -> bool:
    return node is None


# Flat lists.


def pick(leaves: Sequence[_Leaf], flags: Sequence[bool]) -> list[_Leaf]:
    """The leaves that are marked."""
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def put(
    leaves: Sequence[_Leaf], flags: Sequence[bool], marked: Sequence[_Leaf]
) -> list[_Leaf]:
    """The leaves, with the marked ones replaced."""
    new = iter(marked)
    return [
        next(new) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
    ]


def union(flags: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The marks of what is marked in one list or in the other; bits, if it has any."""
    return [a | b for a, b in zip(flags, others, strict=True)]


def closed_under(
    flags: Sequence[Any], more: Callable[[list[Any]], Sequence[Any]]
) -> list[Any]:
    """Some marks, and those that follow from them, until no mark is added."""
    found = list(flags)
    while (grown := union(found, more(found))) != found:
        found = grown
    return found


def split(leaves: Sequence[_Leaf], *counts: int) -> Any:
    """Cuts `leaves` into consecutive lists of those lengths, and one with the rest."""
    pieces: list[list[_Leaf]] = []
    start = 0
    for count in counts:
        pieces.append(list(leaves[start : start + count]))
        start += count
    return (*pieces, list(leaves[start:]))


def interleave(
    flags: Sequence[bool], others: Sequence[_Leaf], marked: Sequence[_Leaf]
) -> list[_Leaf]:
    """One list of two: `marked` where there is a mark, and `others` elsewhere."""
    sources = iter(others), iter(marked)
    return [next(sources[flag]) for flag in flags]
