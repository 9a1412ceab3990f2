"""What is added up over the rows of a map, and how rows in two chunks count once."""

from typing import Any

import jax
import jax.numpy as jnp

from .._axes import broadcast_prefix
from .._formula import is_inexact
from .._partition import describe, flatten, is_dynamic, paths
from ._derivatives import halved
from ._rows import along

Reduction = str | None
_HALF = (jnp.float16, jnp.bfloat16)


def check_reduce(name: str, spec: Any) -> None:
    """Checks a `reduce=` that a user passed."""
    for leaf, path in zip(flatten(spec)[0], paths(spec, "reduce"), strict=True):
        if not (leaf is None or (isinstance(leaf, str) and leaf in ("sum", "mean"))):
            raise ValueError(
                f"{name}: `{path}` must be 'sum', 'mean', or None to stack the rows, "
                f"not {leaf!r}."
            )


def resolve_reductions(name: str, out: Any, spec: Any) -> list[Reduction]:
    """How each of the arrays among what `f` returned is reduced."""
    reductions = []
    specs = broadcast_prefix(spec, out, "out", "reduce", noun="reduction")
    for leaf, path, (how, _) in zip(
        flatten(out)[0], paths(out, "out"), specs, strict=True
    ):
        if not is_dynamic(leaf):
            continue
        if how is not None and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name}: reduce={how!r} adds up what f returns, which cannot be done "
                f"with {path}, which is {describe(leaf)}. Give it None in a tree of "
                f"reductions, to stack it."
            )
        reductions.append(how)
    return reductions


def total(y: Any, visits: Any, axis: int) -> Any:
    """The sum over the rows of a chunk, in which rows of two chunks are halves.

    Numbers of 16 bits are added up in 32. Those that have no halves count at the second
    visit.
    """
    if visits is not None and is_inexact(y):
        y = halved(y, visits, axis)
    elif visits is not None:
        y = jnp.where(along(visits == 1, axis, y), jnp.zeros_like(y), y)
    return jnp.sum(y, axis, dtype=jnp.float32 if y.dtype in _HALF else None)


def finish(how: Reduction, total: Any, length: int, dtype: Any) -> Any:
    """What was asked for, from the sum over all rows; `dtype` is that of a row."""
    if how == "mean":
        total = total / length
    return total.astype(dtype) if dtype in _HALF else total
