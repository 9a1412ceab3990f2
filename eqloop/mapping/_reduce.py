"""Sums over the rows of a map, in which rows that are in two chunks count once."""

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    along,
    broadcast_prefix,
    describe,
    flatten,
    is_dynamic,
    is_inexact,
    is_scalar,
    paths,
)
from .._types import PyTree, Value
from ._chunk_derivatives import halved

Reduction = str | None
_HALF = (jnp.float16, jnp.bfloat16)


def check_reduce(name: str, spec: object) -> None:
    """Checks a `reduce=` that a user passed."""
    for leaf, path in zip(flatten(spec)[0], paths(spec, "reduce"), strict=True):
        if not (leaf is None or (isinstance(leaf, str) and leaf in ("sum", "mean"))):
            raise ValueError(
                f"{name}: `{path}` must be 'sum', 'mean', or None to stack the rows, "
                f"not {leaf!r}."
            )


def resolve_reductions(
    name: str, out: PyTree, spec: PyTree
) -> tuple[PyTree, list[Reduction]]:
    """Finds the reduction of each array that `f` returned.

    Args:
        name: The name of the transform, for error messages.
        out: The result of `f`.
        spec: A prefix tree of reductions.

    Returns:
        The result, in which Python numbers that are reduced have become arrays; and the
        reduction of each of its arrays.
    """
    leaves, treedef = flatten(out)
    specs = broadcast_prefix(name, spec, out, "out", "reduce", noun="reduction")
    reductions: list[Reduction] = []
    for index, (path, (how, _)) in enumerate(
        zip(paths(out, "out"), specs, strict=True)
    ):
        if how is not None and is_scalar(leaves[index]):
            leaves[index] = jnp.asarray(leaves[index])
        if is_dynamic(leaf := leaves[index]):
            _check_adds_up(name, path, leaf, how)
            reductions.append(how)
    return treedef.unflatten(leaves), reductions


def _check_adds_up(name: str, path: str, leaf: Value, how: Reduction) -> None:
    if how is not None and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{name}: reduce={how!r} adds up what f returns, which cannot be done with "
            f"{path}, which is {describe(leaf)}. Give it None in a tree of reductions, "
            f"to stack it."
        )


def total(y: Value, visits: PyTree, axis: int) -> Value:
    """The sum over the rows of a chunk, where a row in two chunks counts half in each.

    Integers cannot be halved, and count only in the second of the two chunks. Floats of
    16 bits are added up in 32 bits.
    """
    if visits is not None and is_inexact(y):
        y = halved(y, visits, axis)
    elif visits is not None:
        y = jnp.where(along(visits == 1, (axis,), y), jnp.zeros_like(y), y)
    return jnp.sum(y, axis, dtype=jnp.float32 if y.dtype in _HALF else None)


def finish(how: Reduction, total: Value, length: int, dtype: np.dtype) -> Value:
    """The reduction, from the sum over all rows; `dtype` is that of one row."""
    if how == "mean":
        total = total / length
    return total.astype(dtype) if dtype in _HALF else total
