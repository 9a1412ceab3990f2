"""Tangents and cotangents: what can have them, and the symbolic zeros among them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.hijax import Zero, instantiate_zeros

from .._types import Aval, PyTree, Value
from ._array_types import axes_of, explicit_sharding, has_dtype, is_type, type_of, vary
from ._partition import Flags, is_key, pick
from ._sums import SumType, sum_dtype


def is_inexact(x: Value) -> bool:
    """Whether a value, or one of this type, can have a tangent."""
    # A literal of a program may be a Python number, which has no dtype.
    aval = x if has_dtype(x) else type_of(x)
    if not has_dtype(aval):
        aval = aval.to_tangent_aval()  # of a `hijax` type: of an array, or of its own
    return not has_dtype(aval) or jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(x: Value) -> bool:
    """Whether an array, or one of this type, has complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_zero(x: object) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(x, Zero)


def zero_tangent(aval: Aval) -> Value:
    """The symbolic zero among the tangents of a type."""
    return Zero(aval.to_tangent_aval())


def zero_cotangent(aval: Aval) -> Value:
    """The symbolic zero among the cotangents of a type."""
    return Zero(aval.to_ct_aval())


def tangent_types(types: Sequence[Aval], flags: Sequence[bool]) -> list[Aval]:
    """The types of the tangents of what is marked."""
    return [aval.to_tangent_aval() for aval in pick(types, flags)]


def cotangent_types(types: Sequence[Aval], flags: Sequence[bool]) -> list[Aval]:
    """The types of the cotangents of what is marked."""
    return [aval.to_ct_aval() for aval in pick(types, flags)]


def with_tangent_types(groups: PyTree, flags: Sequence[Flags]) -> PyTree:
    """Groups of types, behind each those of the tangents of what is marked in it."""
    pairs = zip(groups, flags, strict=True)
    return tuple([*types, *tangent_types(types, marks)] for types, marks in pairs)


def inexact_only(flags: Sequence[bool], leaves: Sequence[Value]) -> Flags:
    """The marks of those leaves that can have a tangent."""
    return tuple(
        bool(flag) and is_inexact(leaf)
        for flag, leaf in zip(flags, leaves, strict=True)
    )


def nonzero(tree: PyTree) -> PyTree:
    """A mark for each leaf of a tree of tangents."""
    return jax.tree.map(lambda x: not is_zero(x), tree, is_leaf=is_zero)


def zero_array(aval: Aval) -> Value:
    """An array of zeros of a type."""
    if is_key(aval):
        zeros = jnp.zeros(aval.shape, aval.dtype, out_sharding=explicit_sharding(aval))
        return vary(zeros, axes_of(aval))
    return instantiate_zeros(Zero(aval))


def instantiated(tree: PyTree) -> PyTree:
    """A tree of tangents or cotangents with arrays for symbolic zeros."""
    return jax.tree.map(instantiate_zeros, tree, is_leaf=is_zero)


def zero_cotangent_of(x: Value, sums: SumType) -> Value:
    """The zeros that the cotangents of a value are added to, in a type for sums."""
    aval = jax.typeof(x)
    # Those of a `hijax` type have a type of their own.
    if not is_type(aval):
        return instantiate_zeros(zero_cotangent(aval))
    return jnp.zeros_like(x, dtype=sum_dtype(aval.dtype, sums))
