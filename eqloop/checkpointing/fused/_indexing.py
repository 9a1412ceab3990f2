"""Slices at places that are computed, which may differ from row to row."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._programs import aval_of
from ..._types import Value
from ._elementwise import chosen
from ._entries import is_known, places_of
from ._scope import BlockScope, objects, valued


def _clamped(at: Any, dtype: Any, most: int) -> Any:
    """The start of a slice, moved into range."""
    if is_known(at):
        return np.int32(min(max(int(at), 0), most))
    # As wide as the sizes of an array, with or without a sign.
    at = jnp.asarray(at, dtype)
    at = at.astype(jnp.int32) if dtype.itemsize < 4 else at
    return jnp.minimum(jnp.maximum(at, 0), most).astype(jnp.int32)


def _taken(
    scope: BlockScope, a: np.ndarray, starts: Any, sizes: Any, dtype: Any
) -> Any:
    """The part of an array from these starts on, which are in range."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if a.shape[axis] == size:
            continue
        a = np.moveaxis(a, axis, 0)
        out = np.empty((size, *a.shape[1:]), object)
        table = _strided(a) if not is_known(start) else None
        for i in range(size):
            rows = a[i : i + a.shape[0] - size + 1].reshape(a.shape[0] - size + 1, -1)
            if table is not None:
                # Rows of a table in memory are not all read.
                read, step = table
                got = [read(x.at + start * step) for x in rows[0]]
            else:
                rows = rows if is_known(start) else valued(scope, rows)
                got = [chosen(start, list(column), dtype) for column in rows.T]
            out[i] = objects(got, a.shape[1:]) if a.ndim > 1 else got[0]
        a = np.moveaxis(out, 0, axis)
    return a


def _strided(a: np.ndarray) -> tuple[Callable[[Any], Value], int] | None:
    """How to read the rows of a table that lie in memory at equal distances."""
    found = places_of(a.reshape(len(a), -1))
    if len(a) < 2 or found is None:
        return None
    steps = np.diff(found[1], axis=0)
    return None if (steps != steps.flat[0]).any() else (found[0], int(steps.flat[0]))


def dynamic_slice(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[Any]:
    a, *at = ins
    sizes, dtype = eqn.params["slice_sizes"], aval_of(eqn.invars[0]).dtype
    starts = [
        _clamped(scope.value(x[()]), aval_of(v).dtype, n - size)
        for x, v, n, size in zip(at, eqn.invars[1:], a.shape, sizes, strict=True)
    ]
    return [_taken(scope, a, starts, sizes, dtype)]
