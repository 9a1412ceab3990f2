"""Whether results are those of JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .case import Case
from .values import dtype_of

# What only moves numbers, compares them or works on their bits: each bit is the same.
EXACT = frozenset(
    [
        "argmax",
        "argmin",
        "bitcast_convert_type",
        "broadcast_in_dim",
        "ceil",
        "clz",
        "concatenate",
        "copy",
        "copy_p",
        "dynamic_slice",
        "dynamic_update_slice",
        "eq",
        "eq_to",
        "floor",
        "gather",
        "ge",
        "gt",
        "imag",
        "iota",
        "is_finite",
        "le",
        "le_to",
        "lt",
        "lt_to",
        "name",
        "ne",
        "neg",
        "nextafter",
        "not",
        "optimization_barrier",
        "pad",
        "real",
        "reduce_and",
        "reduce_or",
        "reduce_precision",
        "reduce_xor",
        "reshape",
        "rev",
        "round",
        "scatter",
        "select_n",
        "slice",
        "sort",
        "split",
        "squeeze",
        "stack",
        "stop_gradient",
        "tile",
        "top_k",
        "transpose",
        "unstack",
        "convert_element_type",
        "conj",
        "complex",
        "cond",
    ]
)

# By how many units in the last place floats may differ, where it is not these: those
# who interpret programs compile the same functions in other surroundings, where LLVM
# joins a product and a sum to one operation, or uses another approximation.
USUAL, OF_SLOPES = 4, 16
TOLERATED: dict[str, float] = {
    # XLA has another approximation of it for vectors of few.
    "cbrt": 128,
    # XLA rounds in narrow types what is computed in float32 in a kernel.
    "exp2": 32,
    "integer_pow": 32,
}
# What a number that is flushed to zero, or is not, makes of it.
AT_ZERO = {"cbrt": 1 / 3, "sqrt": 1 / 2}

# Slopes of these are NaN times a mask where a row has NaN: XLA may select zero instead.
MASKED = frozenset(["reduce_max", "reduce_min"])

# Slopes that are the difference of 1 and of what may be as large.
OF_ONE = frozenset(["tanh", "logistic"])

# What adds up in another order is as exact as the largest numbers of the row are.
SUMS = frozenset(
    [
        "reduce_sum",
        "lgamma",  # which is a sum of larger numbers near its zeros
        "digamma",
        "cumsum",
        "dot_general",
        "conv_general_dilated",
        "reduce_prod",
        "cumprod",
        "cumlogsumexp",
        "scatter-add",
        "scatter-sub",
        "scatter-mul",
        "reduce_window_sum",
        "reduce_window",
        "fft",
        "cholesky",
        "triangular_solve",
        "tridiagonal_solve",
        "eigh",
        "svd",
        "qr",
        "lu",
        "reduce",
        "ragged_dot_general",
        "select_and_scatter_add",
        "select_and_gather_add",
        "Einsum",
        "custom_linear_solve",
        "householder_product",
        "geqrf",
        "geqp3",
        "tridiagonal",
        "hessenberg",
        "schur",
        "eig",
        "scan",
        "while",
        "mul",
        "div",
        "integer_pow",
        "pow",
        "tanh",
    ]
)


def bits_of(x: Any) -> np.ndarray:
    """An array as NumPy has it; a key as its numbers."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    return np.asarray(x)


def judge(
    case: Case, found: Sequence[Any], expected: Sequence[Any], is_slope: bool
) -> str | None:
    """What is wrong, `None` if nothing is."""
    operation, ulps = case.operation, case.ulps
    if len(found) != len(expected):
        return f"{len(found)} results for {len(expected)}"
    for n, (a, e) in enumerate(zip(found, expected, strict=True)):
        if a.dtype != e.dtype or a.shape != e.shape:
            return f"result {n} is {a.dtype}{a.shape}, not {e.dtype}{e.shape}"
        a, e = bits_of(a), bits_of(e)
        bad = _differs(operation, ulps, a, e, is_slope)
        if bad.any():
            at = tuple(int(i[0]) for i in np.nonzero(bad))
            kind = "slope" if is_slope else "result"
            count = f"{bad.sum()} of {bad.size}"
            return f"{kind} {n} is {a[at]!s}, not {e[at]!s}, at {at} ({count})"
    return None


def _differs(
    operation: str, ulps: float | None, a: np.ndarray, e: np.ndarray, is_slope: bool
) -> np.ndarray:
    dtype = dtype_of(e.dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(a != e)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        with np.errstate(all="ignore"):
            scale = np.abs(e)
            both = [(x.real, y.real) for x, y in ((a, e),)] + [(a.imag, e.imag)]
        found = [_apart(operation, ulps, x, y, is_slope, scale) for x, y in both]
        # A complex number that has a NaN, or is infinite, may be so in either part.
        is_odd = ~(np.isfinite(e.real) & np.isfinite(e.imag))
        same_odd = is_odd & ~(np.isfinite(a.real) & np.isfinite(a.imag))
        loose = operation not in EXACT or is_slope
        return (found[0] | found[1]) & ~(same_odd & loose)
    return _apart(operation, ulps, a, e, is_slope, None)


def _apart(
    operation: str,
    ulps: float | None,
    a: np.ndarray,
    e: np.ndarray,
    is_slope: bool,
    scale: np.ndarray | None,
) -> np.ndarray:
    info = ml_dtypes.finfo(e.dtype)
    is_exact = operation in EXACT and ulps is None and not is_slope
    a, e = a.astype(np.float64), e.astype(np.float64)
    with np.errstate(all="ignore"):
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        if is_slope and operation in MASKED:
            same |= np.isnan(a) & (e == 0)
        if is_exact:
            return ~same | ((np.signbit(a) != np.signbit(e)) & ~np.isnan(e))
        if ulps is None:
            ulps = TOLERATED.get(operation, USUAL)
        ulps = max(ulps, OF_SLOPES) if is_slope else ulps
        size = np.abs(e) if scale is None else scale.astype(np.float64)
        if is_slope or operation in SUMS:
            finite = np.where(np.isfinite(size), size, 0)
            axes = tuple(range(min(2, finite.ndim - 1), finite.ndim))
            size = np.maximum(size, finite.max(axes, keepdims=True, initial=0))
        if is_slope and operation in OF_ONE:
            size = np.maximum(size, 1)
        # What is smaller is flushed to zero, or is not.
        tiny = 2 * float(info.tiny) ** AT_ZERO.get(operation, 1)
        room = ulps * float(info.eps) * size + tiny
        return ~(same | (np.abs(a - e) <= room))
