"""Tangents and cotangents: what can have them, and the symbolic zeros among them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.hijax import Zero, instantiate_zeros

from ._partition import pick


def is_inexact(x: Any) -> bool:
    """Whether a value, or one of this type, can have a tangent."""
    # A literal of a program is a number of Python's, and has no dtype of its own.
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(x, Zero)


def zero_tangent(aval: Any) -> Any:
    """The symbolic zero among the tangents of a type."""
    return Zero(aval.to_tangent_aval())


def zero_cotangent(aval: Any) -> Any:
    """The symbolic zero among the cotangents of a type."""
    return Zero(aval.to_ct_aval())


def tangent_types(types: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The types of the tangents of what is marked."""
    return [aval.to_tangent_aval() for aval in pick(types, flags)]


def cotangent_types(types: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The types of the cotangents of what is marked."""
    return [aval.to_ct_aval() for aval in pick(types, flags)]


def nonzero(tree: Any) -> Any:
    """A mark for each leaf of a tree of tangents."""
    return jax.tree.map(lambda x: not is_zero(x), tree, is_leaf=is_zero)


def instantiated(tree: Any) -> Any:
    """A tree of tangents or cotangents with arrays for symbolic zeros."""
    return jax.tree.map(instantiate_zeros, tree, is_leaf=is_zero)
