"""What only moves numbers, by few moves: functions of JAX, as those of `_lowered.py`.

gather --> slices at computed places     scan --> its steps, one after the other
pad --> a concatenation                  iota --> numbers that are known
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import split, zero_array
from ..._compat import close, scan_counts
from ..._programs import aval_of, run, said
from ..._types import Value
from ._classes import refuse
from ._formulas import greatest, least
from ._windows import Windows

Function = Callable[..., Any]


def slices(x: Value, axis: int, start: int, step: int = 1, stop: Any = None) -> Value:
    stop = x.shape[axis] if stop is None else stop
    return lax.slice_in_dim(x, start, stop, step, axis)


def stacked(parts: Sequence[Value], axis: int) -> Value:
    return lax.concatenate([lax.expand_dims(x, [axis]) for x in parts], axis)


def _numbered(eqn: jex.JaxprEqn) -> Value:
    p, axis = eqn.params, eqn.params["dimension"]
    numbers = np.arange(p["shape"][axis]).astype(p["dtype"])
    others = [i for i in range(len(p["shape"])) if i != axis]
    return np.broadcast_to(np.expand_dims(numbers, others), p["shape"])


def _padded(eqn: jex.JaxprEqn, x: Value, value: Value) -> Value:
    def with_ends(x: Value, axis: int, low: int, high: int) -> Value:
        size = lambda n: (*x.shape[:axis], max(n, 0), *x.shape[axis + 1 :])
        ends = [jnp.broadcast_to(value, size(n)) for n in (low, high)]
        x = lax.concatenate([ends[0], x, ends[1]], axis)
        if low >= 0 <= high:
            return x
        return slices(x, axis, max(-low, 0), 1, x.shape[axis] + min(high, 0))

    for axis, (low, high, within) in enumerate(eqn.params["padding_config"]):
        if within and (n := x.shape[axis]):
            parts = with_ends(lax.expand_dims(x, [axis + 1]), axis + 1, 0, within)
            sizes = *x.shape[:axis], n * (within + 1), *x.shape[axis + 1 :]
            x, high = lax.reshape(parts, sizes), high - within
        x = with_ends(x, axis, low, high) if low or high else x
    return x


def is_put(eqn: jex.JaxprEqn) -> bool:
    """Whether it puts a part to a place that is known, which only moves numbers."""
    is_update = eqn.primitive.name == "dynamic_update_slice"
    return is_update and all(isinstance(x, jex.Literal) for x in eqn.invars[2:])


def _updated(eqn: jex.JaxprEqn, x: Value, new: Value, *at: Value) -> Value:
    """For each place of the part that is moved, the new numbers or the old ones."""
    if not new.size:
        return x
    counts = np.subtract(x.shape, new.shape) + 1
    hits = [
        _inside(start, n - 1) == lax.broadcasted_iota(np.int32, counts, i)
        for i, (start, n) in enumerate(zip(at, counts, strict=True))
        if n > 1
    ]
    hit = functools.reduce(lax.bitwise_and, hits, np.ones(counts, bool))
    # An axis that the part has as a whole is chosen at once.
    each = np.where(counts > 1, 1, new.shape)
    for index in np.ndindex(*(new.shape // each)):
        old = lax.slice(x, index, (index + each + counts - 1).tolist())
        part = jnp.where(hit, lax.slice(new, index, (index + each).tolist()), old)
        x = lax.dynamic_update_slice(
            x, part, list(map(np.int32, index)), allow_negative_indices=False
        )
    return x


def _inside(at: Value, most: Any) -> Value:
    """The start of a part, moved into range."""
    # As wide as the sizes of the operand.
    at = at.astype(np.int32) if at.dtype.itemsize < 4 else at
    most = jnp.broadcast_to(np.array(most, at.dtype), at.shape)
    return lax.clamp(jnp.zeros_like(at), at, most).astype(np.int32)


# The most steps of an inner scan that are written out.
_MOST_STEPS = 64


def _written_out(eqn: jex.JaxprEqn, *given: Value) -> list[Value]:
    p, length = eqn.params, eqn.params["length"]
    consts, carry, xs = split(given, *scan_counts(p))
    m, body = len(carry), functools.partial(run, close(p["jaxpr"]), *consts)
    if not xs and len(eqn.outvars) == m and length > 4:
        step = lambda state: [state[0] + 1, *body(*state[1:])]
        start = [np.int32(0), *carry]
        return lax.while_loop(lambda state: state[0] < length, step, start)[1:]
    if length > _MOST_STEPS:
        refuse(
            said(eqn),
            f"has {length} steps, each with an entry of an array, and a kernel writes "
            f"them out: at most {_MOST_STEPS}",
            "Use another schedule for the loop around it, or fewer steps.",
        )
    ys = list[list[Value]]([[]] * length)
    for i in range(length)[:: -1 if p["reverse"] else 1]:
        made = body(*carry, *(lax.index_in_dim(x, i, 0, False) for x in xs))
        carry, ys[i] = split(made, m)
    if not length:
        return [*carry, *(zero_array(aval_of(y)) for y in eqn.outvars[m:])]
    return [*carry, *(stacked(y, 0) for y in zip(*ys, strict=True))]


# What only moves numbers.
BY_MOVES: dict[str, Function] = {
    "iota": _numbered,
    "pad": _padded,
    "dynamic_update_slice": _updated,
    "scan": _written_out,
}
# Gathers and scatters: parts of an operand, at places that are computed.


def _starts(
    eqn: jex.JaxprEqn, shape: Sequence[int], sizes: Sequence[int], at: Value
) -> Callable[[tuple[int, ...]], tuple[list[Value], Value]]:
    """Where a part starts, within the operand, and whether it is within of itself."""
    windows = Windows.of(eqn.params)
    given, at = at, _inside(at, [shape[i] - sizes[i] for i in windows.starts])
    inside = given == at.astype(given.dtype)

    def of(index: tuple[int, ...]) -> tuple[list[Value], Value]:
        starts: list[Any] = [np.int32(0)] * len(shape)
        for n, axis in enumerate(windows.starts):
            starts[axis] = at[(*index, n)]
        for axis, k in windows.batch:
            starts[axis] = np.int32(index[k])
        every = [inside[(*index, n)] for n in range(len(windows.starts))]
        return starts, functools.reduce(lax.bitwise_and, every, np.True_)

    return of


def gathered(eqn: jex.JaxprEqn, x: Value, at: Value) -> Value:
    p, windows, out = eqn.params, Windows.of(eqn.params), aval_of(eqn.outvars[0])
    starts_at, parts = _starts(eqn, x.shape, p["slice_sizes"], at), list[Value]()
    for index in np.ndindex(*at.shape[:-1]):
        starts, inside = starts_at(index)
        part = lax.dynamic_slice(
            x, starts, p["slice_sizes"], allow_negative_indices=False
        )
        if p["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            fill = p["fill_value"]
            fill = _fill_of(x.dtype) if fill is None else fill
            part = jnp.where(inside, part, lax.full_like(part, fill))
        parts.append(lax.squeeze(part, (*windows.dropped, *windows.operand_batch)))
    if not parts:
        return jnp.zeros(out.shape, out.dtype)
    every = stacked(parts, 0).reshape(*at.shape[:-1], *parts[0].shape)
    # The axes of the indices are the first ones, and then come those of the parts.
    order = (*windows.of_indices(out.ndim), *windows.own)
    return lax.transpose(every, [order.index(j) for j in range(out.ndim)])


def _fill_of(dtype: Any) -> Any:
    """What JAX takes for an entry that is out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger)
    return least(dtype) if is_signed else greatest(dtype)


def scattered(f: Function) -> Function:
    def of(eqn: jex.JaxprEqn, x: Value, at: Value, new: Value) -> Value:
        windows = Windows.of(eqn.params)
        batch, sizes = windows.of_indices(new.ndim), [1] * x.ndim
        for i, j in zip(windows.kept(x.ndim), windows.own, strict=True):
            sizes[i] = new.shape[j]
        starts_at = _starts(eqn, x.shape, sizes, at)
        for index in np.ndindex(*at.shape[:-1]):
            starts, inside = starts_at(index)
            place: list[Any] = [slice(None)] * new.ndim
            for j, i in zip(batch, index, strict=True):
                place[j] = i
            old = lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)
            part = f(old, new[tuple(place)].reshape(sizes))
            # XLA drops what is promised to be within, and is not.
            if eqn.params["mode"] != lax.GatherScatterMode.CLIP:
                part = jnp.where(inside, part, old)
            x = lax.dynamic_update_slice(x, part, starts, allow_negative_indices=False)
        return x

    return of
