"""The carry: which of its leaves vary, and whether it comes out as it went in.

The initial carry tells only half of it. A Python number in it is static if `f` hands
the very same number back and an array otherwise, and a weakly typed array may have to
be promoted; both show only when `f` has been traced. So `Carry.settle` compares what
came in with what came out, and says with which carry to trace again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
from jax import lax

from .._partition import (
    as_array,
    flatten,
    is_dynamic,
    is_scalar,
    paths,
    same_static,
    split,
)
from .._weak_types import is_weak, with_weak_types
from ._mismatch import is_type, static_changes, structure_changes, type_changes
from ._words import OF_A_SCAN, Words


@dataclasses.dataclass(frozen=True)
class Carry:
    """An initial carry, with the leaves that vary as arrays.

    Attributes:
        owner: The name of the transform, for error messages.
        tree: The carry; its arrays are JAX arrays.
        words: What it is called, for error messages.
    """

    owner: str
    tree: Any
    words: Words = OF_A_SCAN

    @classmethod
    def of(cls, owner: str, init: Any, words: Words = OF_A_SCAN) -> Self:
        """The carry in which Python numbers are taken to be static."""
        return cls(owner, _convert(init, is_dynamic), words)

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

    def final(self, arrays: list[Any], out: Any) -> Any:
        """The carry after the last step, with weak types where every carry has them.

        Args:
            arrays: Its leaves that vary.
            out: The carry that came out of a step, as `types_of` gives it.
        """
        before, after = flatten(self.tree)[0], flatten(out)[0]
        pairs = zip(before, after, strict=True)
        weak = [is_weak(b) and is_weak(a) for b, a in pairs if is_dynamic(b)]
        return self.join(with_weak_types(arrays, weak))

    def take(self, out: Any) -> list[jax.Array]:
        """The leaves that vary of the carry that `f` made of this one.

        Leaves that do not fit are left out; they are for `settle` to judge.
        """
        before, treedef = flatten(self.tree)
        after, after_treedef = flatten(out)
        if treedef != after_treedef:
            return []
        return [
            as_array(a)
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
            self._raise_changed(structure_changes(self.tree, out, self.words.path))
        promoted = [_promote(b, a) for b, a in zip(before, after, strict=True)]
        if any(p is not b for p, b in zip(promoted, before, strict=True)):
            return dataclasses.replace(self, tree=treedef.unflatten(promoted))
        names = paths(self.tree, self.words.path)
        leaves = list(zip(names, before, after, strict=True))
        if changes := type_changes(leaves):
            self._raise_changed(changes)
        if changes := static_changes(leaves):
            self._raise_static(changes)
        return self

    def _split(self) -> Any:
        return split(self.tree, [is_dynamic(leaf) for leaf in flatten(self.tree)[0]])

    def _raise_changed(self, changes: list[str]) -> NoReturn:
        words = self.words
        raise TypeError(
            f"{self.owner}: {words.carry} must keep its shape, dtype and structure "
            f"from {words.step} to {words.step}, but {words.f} changed it:\n"
            + "\n".join(changes)
        )

    def _raise_static(self, changes: list[str]) -> NoReturn:
        words = self.words
        raise ValueError(
            f"{self.owner}: only arrays and numbers can change from {words.step} to "
            f"{words.step}, but {words.f} changed these leaves of {words.carry}:\n"
            + "\n".join(changes)
            + "\nHand them back as they came, or make them arrays."
        )


def types_of(carry: Any) -> Any:
    """A carry with its arrays reduced to their types, to be kept beyond a trace."""
    return jax.tree.map(lambda x: jax.typeof(x) if is_dynamic(x) else x, carry)


def _convert(tree: Any, which: Callable[[Any], bool]) -> Any:
    return jax.tree.map(lambda x: as_array(x) if which(x) else x, tree)


def _promote(before: Any, after: Any) -> Any:
    """The leaf to start with instead, or `before` itself."""
    if not (is_type(after) or is_scalar(after)):
        return before
    if is_scalar(before):
        return before if same_static(before, after) else jnp.asarray(before)
    if not is_dynamic(before):
        return before
    # Only a weakly typed array gives way, and only in its dtype.
    if jax.typeof(before).weak_type and jnp.shape(after) == before.shape:
        try:
            dtype = jnp.result_type(before, after)
        except jax.dtypes.TypePromotionError:
            return before  # so strict is the promotion: `settle` says that they differ
        if dtype != before.dtype:
            return lax.convert_element_type(before, dtype)
    # Inside `jax.shard_map`, what starts the same on all devices may come to differ.
    axes = _varying_axes(after) - _varying_axes(before)
    return lax.pcast(before, tuple(axes), to="varying") if axes else before


def _varying_axes(leaf: Any) -> frozenset[str]:
    leaf_type = leaf if is_type(leaf) else jax.typeof(leaf)
    return leaf_type.manual_axis_type.varying
