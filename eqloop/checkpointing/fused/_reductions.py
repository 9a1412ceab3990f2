"""Reductions, cumulative ones, and sorts: all are written out."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._programs import aval_of
from ..._types import Value
from . import _formulas as formulas
from ._elementwise import simplified
from ._entries import Parts, is_known, parts_of
from ._parts import COMPLEX, complex_of
from ._scope import BlockScope, alike, any_row, mapped, objects, valued

REDUCTIONS: dict[str, Callable[..., Value]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
}


def pairwise(f: Callable[..., Value], dtype: Any, name: str) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        if isinstance(a, Parts) or isinstance(b, Parts):
            of = COMPLEX["add" if f is lax.add else "mul"]
            return complex_of(of, {}, [a, b], [dtype, dtype], parts_of(dtype)[1])
        if is_known(a) and is_known(b):
            fold = {lax.add: np.add, lax.mul: np.multiply}.get(f)
            if fold is not None:
                return np.asarray(fold(a, b), dtype)[()]
        is_sum = name in ("reduce_sum", "cumsum")
        simple = simplified("add", [a, b]) if is_sum else None
        if simple is not None:
            return simple
        return f(*alike([dtype, dtype], [a, b]))

    return run


def _rows_along(a: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The array as a matrix: the other axes, and these."""
    left = [i for i in range(a.ndim) if i not in axes]
    a = a.transpose([*left, *axes])
    n = math.prod(a.shape[len(left) :])
    return a.reshape(-1, n) if n else a.reshape(math.prod(a.shape[: len(left)]), 0)


def reduced(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), out = ins, aval_of(eqn.outvars[0])
    f = pairwise(REDUCTIONS[eqn.primitive.name], out.dtype, eqn.primitive.name)
    rows = _rows_along(valued(scope, a), eqn.params["axes"])
    return [objects([functools.reduce(f, list(row)) for row in rows], out.shape)]


def any_of_block(
    scope: BlockScope, eqn: Any, ins: list[np.ndarray]
) -> list[np.ndarray]:
    flags = map(scope.value, ins[0].reshape(-1))
    return [objects([any_row(functools.reduce(lambda a, b: a | b, flags))], ())]


def cumulated(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), axis = ins, eqn.params["axis"]
    f = pairwise(
        REDUCTIONS[eqn.primitive.name],
        aval_of(eqn.outvars[0]).dtype,
        "cumsum" if eqn.primitive.name == "cumsum" else "",
    )
    a = np.moveaxis(valued(scope, a), axis, 0)
    order = range(len(a))[::-1] if eqn.params["reverse"] else range(len(a))
    out, before = np.empty(a.shape, object), None
    for i in order:
        row = a[i : i + 1]
        before = row if before is None else mapped(f, before, row)
        out[i : i + 1] = before
    return [np.moveaxis(out, 0, axis)]


def arg_of(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), out = ins, aval_of(eqn.outvars[0])
    dtype, to = aval_of(eqn.invars[0]).dtype, eqn.params["index_dtype"]
    is_max = eqn.primitive.name == "argmax"

    def of(row: Sequence[Any]) -> Any:
        best, at = row[0], np.asarray(0, to)[()]
        for i, x in enumerate(row[1:], 1):
            x, now = alike([dtype, dtype], [x, best])
            better = x > now if is_max else x < now
            if jnp.issubdtype(dtype, jnp.floating):
                better = better | ((x != x) & (now == now))
                better = better & (now == now)
            best, at = (
                jnp.where(better, x, now),
                jnp.where(better, np.asarray(i, to)[()], at),
            )
        return at

    rows = _rows_along(valued(scope, a), eqn.params["axes"])
    return [objects([of(list(row)) for row in rows], out.shape)]


def sort_rows(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, dtypes = eqn.params, [aval_of(v).dtype for v in eqn.invars]
    axis, keys = p["dimension"], p["num_keys"]
    arrays = [np.moveaxis(valued(scope, a), axis, -1).copy() for a in ins]
    for index in np.ndindex(*arrays[0].shape[:-1]):
        columns = [list(a[index]) for a in arrays]
        _sort(columns, dtypes, keys)
        for a, column in zip(arrays, columns, strict=True):
            a[index] = objects(column, [len(column)])
    return [np.moveaxis(a, -1, axis) for a in arrays]


def _sort(columns: list[list[Any]], dtypes: Sequence[Any], keys: int) -> None:
    """Sorts lists by the first few of them: neighbours change places, in rounds."""
    n = len(columns[0])
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            pairs = [
                alike([d, d], c[i : i + 2])
                for c, d in zip(columns, dtypes, strict=True)
            ]
            greater: Value = None
            equal: Value = None
            for a, b in pairs[:keys]:
                g = formulas.is_nan_greater(a, b)
                greater = g if greater is None else greater | (equal & g)
                e = ~g & ~formulas.is_nan_greater(b, a)
                equal = e if equal is None else equal & e
            for c, (a, b) in zip(columns, pairs, strict=True):
                c[i], c[i + 1] = jnp.where(greater, b, a), jnp.where(greater, a, b)


def top_k(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), k = ins, eqn.params["k"]
    dtype, to = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[1]).dtype
    values = np.empty((*a.shape[:-1], k), object)
    places = np.empty((*a.shape[:-1], k), object)
    for index in np.ndindex(*a.shape[:-1]):
        row = [scope.value(x) for x in a[index]]
        column = [jnp.negative(jnp.asarray(x, dtype)) for x in row]
        at = [np.asarray(i, to)[()] for i in range(len(row))]
        columns = [column, at]
        _sort(columns, [dtype, to], 1)
        values[index] = objects([-x for x in columns[0][:k]], [k])
        places[index] = objects(columns[1][:k], [k])
    return [values, places]
