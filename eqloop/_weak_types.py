"""Weak types: taken away before arrays enter a loop, and given back afterwards.

A tangent has no weak type and a primitive must keep the types that it has, so nothing
in a loop is weakly typed. What comes out of it is if it were by `jax.lax.scan`: under
strict promotion the next line may depend on it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import lax
from jax.extend.core import primitives


def is_weak(leaf: Any) -> bool:
    """Whether an array, a type of one or a Python number is weakly typed."""
    if isinstance(leaf, bool | int | float | complex):
        return True
    aval = leaf if isinstance(leaf, jax.core.AbstractValue) else jax.typeof(leaf)
    return getattr(aval, "weak_type", False)


def strongly_typed(leaf: Any) -> Any:
    """An array without a weak type."""
    dtype = jax.typeof(leaf).dtype
    return lax.convert_element_type(leaf, dtype) if is_weak(leaf) else leaf


def with_weak_types(leaves: Sequence[Any], weak: Sequence[bool]) -> list[Any]:
    """Leaves, of which some are to be weakly typed; what is no array of JAX stays."""
    return [
        _weakly_typed(leaf) if becomes_weak and isinstance(leaf, jax.Array) else leaf
        for leaf, becomes_weak in zip(leaves, weak, strict=True)
    ]


def _weakly_typed(leaf: jax.Array) -> Any:
    if is_weak(leaf):
        return leaf
    # `lax.convert_element_type` makes no weak types.
    return primitives.convert_element_type_p.bind(
        leaf, new_dtype=np.dtype(leaf.dtype), weak_type=True, sharding=None
    )
