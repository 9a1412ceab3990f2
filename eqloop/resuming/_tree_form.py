"""A tree without its arrays, and the arrays as they are on disk.

What runs segments, and what stores them, knows lists of plain arrays alone. Keys are
among these as the integers that they hold, and nothing is weakly typed: neither
survives in a file. `TreeForm` gives both back where the user's function is called.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp

from .._arrays import (
    Rest,
    as_array,
    is_inexact,
    is_key,
    is_weak,
    partition,
    paths,
    pick,
    plain,
    with_weak_types,
)
from .._types import PyTree, Value


@dataclasses.dataclass(frozen=True, eq=False)
class TreeForm:
    """What there is to a tree besides its arrays.

    Attributes:
        weak: Which of them are weakly typed.
        keys: For those that are PRNG keys, of which kind.
    """

    rest: Rest
    names: tuple[str, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    weak: tuple[bool, ...]
    keys: tuple[PyTree, ...]

    @classmethod
    def of(cls, tree: PyTree, name: str) -> Self:
        """The form of a tree, which may be that of tracers."""
        arrays, rest = partition(tree)
        return cls(
            rest,
            tuple(pick(paths(tree, name), rest.taken)),
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(plain, arrays)),
            tuple(is_weak(as_array(x)) for x in arrays),
            tuple(jax.random.key_impl(x) if is_key(x) else None for x in arrays),
        )

    @property
    def inexact(self) -> list[bool]:
        """Which of the arrays can have a derivative."""
        return [is_inexact(aval) for aval in self.types]

    def join(self, arrays: Sequence[Value]) -> PyTree:
        """The tree with these arrays, which are plain ones."""
        pairs = zip(self.keys, arrays, strict=True)
        as_keys = lambda x, kind: jax.random.wrap_key_data(jnp.asarray(x), impl=kind)
        typed = [x if kind is None else as_keys(x, kind) for kind, x in pairs]
        return self.rest.join(with_weak_types(typed, self.weak))

    def take(self, tree: PyTree) -> list[Value]:
        """The arrays of a tree of this form, as plain ones."""
        return [plain(x) for x in partition(tree, self.rest.taken)[0]]

    def like(self, leaves: Sequence[Value]) -> PyTree:
        """A tree as this one, with `leaves` for the arrays, and `None` elsewhere."""
        blank = (None,) * len(self.rest.leaves)
        rest = dataclasses.replace(self.rest, leaves=blank)
        return rest.join(with_weak_types(leaves, self.weak))
