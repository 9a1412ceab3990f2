"""The keys of the steps of a segment: those that `jax.random.split` gives all steps."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._arrays import is_key
from .._types import Index, PRNGKey, PyTree

# `jax.random.fold_in` takes 32 bits.
_MOST = 2**32


@dataclasses.dataclass(frozen=True, eq=False)
class StepKeys:
    """The keys of a loop.

    Attributes:
        key: The key that the loop was called with, or `None`.
        is_split: Whether each step has one of its own.
        table: The keys of all steps, as integers on the host, if there is no way to
            have those of a segment without them.
    """

    key: Any
    is_split: bool
    table: np.ndarray | None

    @classmethod
    def of(cls, key: PRNGKey | None, length: int, is_split: bool) -> Self:
        """The keys that a scan gives so many steps."""
        if key is None or not is_split:
            return cls(key, False, None)
        if length < _MOST and _is_folded(key):
            return cls(key, True, None)
        return cls(key, True, np.asarray(_key_numbers(jr.split(key, length))))

    def take(self, start: int, stop: int) -> PyTree:
        """The keys of some steps: one for each, one for all, or `None`."""
        if not self.is_split:
            return self.key
        if self.table is None:
            return _folded_keys(self.key, np.uint32(start), stop - start)
        rows = jnp.asarray(self.table[start:stop])
        if not is_key(self.key):
            return rows
        return jr.wrap_key_data(rows, impl=jr.key_impl(self.key))

    def type(self, steps: int) -> Any:
        """The type of the keys of so many steps."""
        if self.key is None:
            return None
        like = self.key
        shape = (steps, *like.shape) if self.is_split else like.shape
        return jax.ShapeDtypeStruct(shape, like.dtype)


def _is_folded(key: PRNGKey) -> bool:
    """Whether a key is split into the keys that folding in indices gives."""
    # It is so for JAX's own generator, by the way in which it is parallel, and not for
    # each of the others.
    split, folded = jr.split(key, 8), _folded_keys(key, np.uint32(0), 8)
    return bool(jnp.all(_key_numbers(split) == _key_numbers(folded)))


@functools.partial(jax.jit, static_argnums=2)
def _folded_keys(key: jax.Array, start: Index, count: int) -> jax.Array:
    indices = start + jnp.arange(count, dtype=jnp.uint32)
    return jax.vmap(jr.fold_in, (None, 0))(key, indices)


def _key_numbers(keys: jax.Array) -> jax.Array:
    return jr.key_data(keys) if is_key(keys) else keys
