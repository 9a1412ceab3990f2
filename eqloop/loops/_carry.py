"""The carry: which of its leaves vary, and whether it comes out as it went in.

The initial carry tells only half of it. A Python number in it is static if `f` hands
the very same number back and an array otherwise, and a weakly typed array may have to
be promoted; both show only when `f` has been traced. So `Carry.settle` compares what
came in with what came out, and says with which carry to trace again.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._partition import (
    describe,
    flatten,
    is_dynamic,
    is_scalar,
    paths,
    same_static,
    split,
)


@dataclasses.dataclass(frozen=True)
class Carry:
    """An initial carry, with the leaves that vary as arrays.

    Attributes:
        owner: The name of the transform, for error messages.
        tree: The carry; its arrays are JAX arrays.
    """

    owner: str
    tree: Any

    @classmethod
    def of(cls, owner: str, init: Any) -> Self:
        """The carry in which Python numbers are taken to be static."""
        return cls(owner, _convert(init, is_dynamic))

    def varying(self) -> Self:
        """The carry in which Python numbers are arrays."""
        return dataclasses.replace(self, tree=_convert(self.tree, is_scalar))

    @property
    def has_scalars(self) -> bool:
        """Whether a Python number is taken to be static."""
        return any(map(is_scalar, jax.tree.leaves(self.tree)))

    @property
    def arrays(self) -> list[jax.Array]:
        """The leaves that vary."""
        return self._split()[0]

    def join(self, arrays: list[Any]) -> Any:
        """A carry of this structure, and with these static leaves."""
        return self._split()[1].join(arrays)

    def take(self, out: Any) -> list[jax.Array]:
        """The leaves that vary of the carry that `f` made of this one.

        Leaves that do not fit are left out; they are for `settle` to judge.
        """
        before, treedef = flatten(self.tree)
        after, after_treedef = flatten(out)
        if treedef != after_treedef:
            return []
        return [
            jnp.asarray(a)
            for b, a in zip(before, after, strict=True)
            if is_dynamic(b) and (is_dynamic(a) or is_scalar(a))
        ]

    def settle(self, out: Any) -> Self:
        """Compares this carry with the one that `f` made of it.

        Args:
            out: The carry that came out, as `types_of` gives it.

        Returns:
            This very object, if the two fit; else the carry to try instead.

        Raises:
            TypeError: If shapes, dtypes or structure changed.
            ValueError: If a static leaf changed.
        """
        before, treedef = flatten(self.tree)
        after, after_treedef = flatten(out)
        if treedef != after_treedef:
            self._raise_changed(list(_structure_changes(self.tree, out, "carry")))
        promoted = [_promote(b, a) for b, a in zip(before, after, strict=True)]
        if any(p is not b for p, b in zip(promoted, before, strict=True)):
            return dataclasses.replace(self, tree=treedef.unflatten(promoted))
        names = paths(self.tree, "carry")
        leaves = list(zip(names, before, after, strict=True))
        self._raise_changed([line for leaf in leaves for line in _type_changes(*leaf)])
        self._raise_static(
            [
                f"  {name}: {describe(before)} came in, {describe(after)} came out"
                for name, before, after in leaves
                if not is_dynamic(before) and not same_static(before, after)
            ]
        )
        return self

    def _split(self) -> Any:
        return split(self.tree, [is_dynamic(leaf) for leaf in flatten(self.tree)[0]])

    def _raise_changed(self, lines: list[str]) -> None:
        if lines:
            listing = "\n".join(lines)
            raise TypeError(
                f"{self.owner}: the carry must keep its shape, dtype and structure "
                f"from step to step, but f changed it:\n{listing}"
            )

    def _raise_static(self, lines: list[str]) -> None:
        if lines:
            listing = "\n".join(lines)
            raise ValueError(
                f"{self.owner}: only arrays and numbers can change from step to step, "
                f"but f changed these leaves of the carry:\n{listing}\nHand them back "
                f"as they came, or make them arrays."
            )


def types_of(carry: Any) -> Any:
    """A carry with its arrays reduced to their types, to be kept beyond a trace."""
    return jax.tree.map(lambda x: jax.typeof(x) if is_dynamic(x) else x, carry)


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.ShapedArray)


def _convert(tree: Any, which: Callable[[Any], bool]) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x) if which(x) else x, tree)


def _promote(before: Any, after: Any) -> Any:
    """The leaf to start with instead, or `before` itself."""
    if not (_is_type(after) or is_scalar(after)):
        return before
    if is_scalar(before):
        return before if same_static(before, after) else jnp.asarray(before)
    if not is_dynamic(before):
        return before
    # Only a weakly typed array gives way, and only in its dtype.
    if jax.typeof(before).weak_type and jnp.shape(after) == before.shape:
        dtype = jnp.result_type(before, after)
        if dtype != before.dtype:
            return lax.convert_element_type(before, dtype)
    # Inside `jax.shard_map`, what starts the same on all devices may come to differ.
    axes = _varying_axes(after) - _varying_axes(before)
    return lax.pcast(before, tuple(axes), to="varying") if axes else before


def _varying_axes(leaf: Any) -> frozenset[str]:
    leaf_type = leaf if _is_type(leaf) else jax.typeof(leaf)
    return leaf_type.manual_axis_type.varying


def _type_changes(name: str, before: Any, after: Any) -> Iterator[str]:
    if is_dynamic(before) and is_scalar(after):
        after = types_of(jnp.asarray(after))
    if not is_dynamic(before) and not _is_type(after):
        return
    line = f"  {name}: {describe(before)} came in, {describe(after)} came out"
    if not (is_dynamic(before) and _is_type(after)) or before.shape != after.shape:
        yield line
    elif before.dtype != after.dtype:
        yield f"{line} (cast it with .astype, or start from {_article(after.dtype)})"


def _article(dtype: Any) -> str:
    return f"{'an' if str(dtype)[0] in 'aeiou' else 'a'} {dtype}"


def _structure_changes(before: Any, after: Any, name: str) -> Iterator[str]:
    """Where two trees part, from the top down."""
    line = f"  {name}: {_kind(before)} came in, {_kind(after)} came out"
    if _is_leaf(before) and _is_leaf(after):
        return
    if type(before) is not type(after):
        yield line
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
            yield f"  {name}: the static fields of the {type(before).__name__} changed"


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
