"""Slices, gathers and scatters, whose indices may differ from row to row."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._programs import aval_of
from ..._types import Value
from ._elementwise import chosen, where
from ._entries import InMemory, is_known
from ._reductions import pairwise
from ._scope import BlockScope, entry, mapped, objects, valued
from ._windows import Windows


def _clamped(at: Any, dtype: Any, most: int) -> Any:
    """The start of a slice, moved into range."""
    if is_known(at):
        return np.int32(min(max(int(at), 0), most))
    at = jnp.asarray(at, dtype).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(at, 0), most)


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
    flat = a.reshape(len(a), -1)
    if not all(isinstance(x, InMemory) for x in flat.reshape(-1)) or len(a) < 2:
        return None
    read = flat[0, 0].read
    at = np.array([[x.at if x.read is read else -1 for x in row] for row in flat])
    steps = np.diff(at, axis=0)
    if (at < 0).any() or (steps != steps.flat[0]).any():
        return None
    return read, int(steps.flat[0])


def dynamic_slice(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[Any]:
    a, *at = ins
    sizes, dtype = eqn.params["slice_sizes"], aval_of(eqn.invars[0]).dtype
    starts = [
        _clamped(scope.value(x[()]), aval_of(v).dtype, n - size)
        for x, v, n, size in zip(at, eqn.invars[1:], a.shape, sizes, strict=True)
    ]
    return [_taken(scope, a, starts, sizes, dtype)]


def _put(
    scope: BlockScope, a: np.ndarray, new: np.ndarray, starts: Any, dtype: Any, f: Any
) -> Any:
    """An array with a part from these starts on replaced by `f(old, new)`."""
    if all(map(is_known, starts)):
        out = a.copy()
        part = tuple(
            slice(int(s), int(s) + n) for s, n in zip(starts, new.shape, strict=True)
        )
        old = out[part]
        out[part] = mapped(f, old, new) if a.ndim else mapped(f, old, new)[()]
        return out
    out = np.empty(a.shape, object)
    for index in np.ndindex(*a.shape):
        old = scope.value(a[index])
        now = old
        # Each entry of the part may come here, for one value of the start.
        for k in np.ndindex(*new.shape):
            hits = [(s, i - j) for s, i, j in zip(starts, index, k, strict=True)]
            if any(
                w < 0 or w > n - m
                for (_, w), n, m in zip(hits, a.shape, new.shape, strict=True)
            ):
                continue
            if any(is_known(s) and int(s) != w for s, w in hits):
                continue
            hit = functools.reduce(
                lambda p, q: p & q, [s == w for s, w in hits if not is_known(s)]
            )
            now = where(hit, f(old, scope.value(new[k])), now, dtype)
        out[index] = now
    return out


def update_slice(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[Any]:
    a, new, *at = ins
    dtype = aval_of(eqn.invars[0]).dtype
    starts = [
        _clamped(scope.value(x[()]), aval_of(v).dtype, n - m)
        for x, v, n, m in zip(at, eqn.invars[2:], a.shape, new.shape, strict=True)
    ]
    return [_put(scope, a, new, starts, dtype, lambda old, new: new)]


def gather(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a, at), p, out = ins, eqn.params, aval_of(eqn.outvars[0])
    windows, sizes, dtype = Windows.of(p), p["slice_sizes"], out.dtype
    result, kept = np.empty(out.shape, object), windows.kept(a.ndim)
    is_batch = windows.of_indices(len(out.shape))
    fills = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    for index in np.ndindex(*at.shape[:-1]):
        starts, inside = _starts(scope, eqn, at[index], a.shape, sizes, index)
        part = _taken(scope, a, starts, sizes, dtype)
        part = part.reshape([sizes[i] for i in kept])
        if fills and inside is not None:
            fill = p["fill_value"]
            fill = _fill_of(dtype) if fill is None else fill
            fill = np.asarray(fill, dtype)[()]
            keep = lambda x, i=inside, f=fill: where(i, scope.value(x), f, dtype)
            part = mapped(keep, part)
        place: list[Any] = [slice(None)] * len(out.shape)
        for j, i in zip(is_batch, index, strict=True):
            place[j] = i
        result[tuple(place)] = part if part.ndim else part[()]
    return [result]


def _fill_of(dtype: Any) -> Any:
    """What JAX takes for an entry that is out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype.kind == "b":
        return True
    info = jnp.iinfo(dtype)
    return info.min if dtype.kind == "i" else info.max


def _starts(
    scope: BlockScope,
    eqn: Any,
    at: np.ndarray,
    shape: Any,
    sizes: Any,
    index: Any,
) -> tuple[list[Any], Any]:
    """Where a slice starts, and whether it is in range, if that is not known."""
    windows = Windows.of(eqn.params)
    starts: list[Any] = [np.int32(0)] * len(shape)
    inside, dtype = None, aval_of(eqn.invars[1]).dtype
    for n, axis in enumerate(windows.starts):
        start, most = scope.value(at[n]), shape[axis] - sizes[axis]
        starts[axis] = _clamped(start, dtype, most)
        ok = (start >= 0) & (start <= most)
        if not (is_known(start) and bool(ok)):
            inside = ok if inside is None else inside & ok
    for axis, k in windows.batch:
        starts[axis] = np.int32(index[k])
    return starts, inside


def scatter(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, dtype = eqn.params, aval_of(eqn.outvars[0]).dtype
    a, at, new = (valued(scope, x) for x in ins)
    windows, name = Windows.of(p), eqn.primitive.name
    batch, sizes = windows.of_indices(new.ndim), [1] * a.ndim
    for i, j in zip(windows.kept(a.ndim), windows.own, strict=True):
        sizes[i] = new.shape[j]
    f: Callable[..., Any] = lambda old, new: new
    if "add" in name:
        f = pairwise(lax.add, dtype, "reduce_sum")
    if "mul" in name:
        f = pairwise(lax.mul, dtype, "")
    drops = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    for index in np.ndindex(*at.shape[:-1]):
        starts, inside = _starts(scope, eqn, at[index], a.shape, sizes, index)
        place: list[Any] = [slice(None)] * new.ndim
        for j, i in zip(batch, index, strict=True):
            place[j] = i
        part = entry(new, tuple(place))
        put = _put(scope, a, part.reshape(sizes), starts, dtype, f)
        if drops and inside is not None:
            keep = lambda x, y, i=inside: x if x is y else where(i, x, y, dtype)
            put = mapped(keep, put, a)
        a = put
    return [a]
