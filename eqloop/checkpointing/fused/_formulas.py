"""Functions of a number, by those that each backend of Pallas has, NaN included.

They are functions of JAX on arrays, as exact as XLA's. `_lowered.py` puts them in place
of the operations of the same names, and replaces what they call in turn.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._types import Value

Params = dict[str, Any]
Rule = Callable[..., Any]

# The rotations of threefry, and the constant of its key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(k0: Value, k1: Value, x0: Value, x1: Value) -> list[Value]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), as JAX's keys use it."""
    u32 = lambda n: jnp.uint32(n)
    keys = [k0, k1, k0 ^ k1 ^ u32(_PARITY)]
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << u32(r)) | (x1 >> u32(32 - r))
            x1 = x0 ^ x1
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + u32(i + 1)
    return [x0, x1]


def _is_float(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_nan(x: Value) -> Value:
    return x != x if _is_float(x) else lax.full_like(x, False, bool)


def _maximum(x: Value, y: Value) -> Value:
    # PTX has the number of a number and a NaN.
    return jnp.where((x >= y) | is_nan(x), x, y)


def _minimum(x: Value, y: Value) -> Value:
    return jnp.where((x <= y) | is_nan(x), x, y)


def _sign(x: Value) -> Value:
    one, zero = lax.full_like(x, 1), lax.full_like(x, 0)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return lax.select(x > zero, one, zero)
    return lax.select(x > zero, one, lax.select(x < zero, -one, x))


def _divided(x: Value, y: Value, of: Rule, by_zero: Rule) -> Value:
    """Integers. By zero there is no trap, and none for the least one by -1."""
    zero, one = lax.full_like(y, 0), lax.full_like(y, 1)
    is_trap = y == zero
    if (least := jnp.iinfo(y.dtype).min) < 0:
        # The least one by 1 is itself, as by -1, and so is the rest.
        is_trap = is_trap | ((x == lax.full_like(x, least)) & (y == -one))
    found = of(x, lax.select(is_trap, one, y))
    return lax.select(y == zero, by_zero(x), found)


def _counted(count: Rule, x: Value, beyond: int) -> Value:
    """What is counted of bits, less so much for each that a wide integer has more."""
    bits = jnp.iinfo(x.dtype).bits
    wide = np.dtype("int32" if bits <= 32 else "int64")
    found = count(lax.bitcast_convert_type(x, np.dtype(f"uint{bits}")).astype(wide))
    return (found - beyond * (8 * wide.itemsize - bits)).astype(x.dtype)


def _shifted(x: Value, n: Value, shift: Rule) -> Value:
    most = lax.full_like(n, jnp.iinfo(x.dtype).bits - 1)
    is_far = (n > most) | (n < lax.full_like(n, 0))
    found = shift(x, lax.select(is_far, most, n))
    # Then each bit is the first one, of numbers without a sign too.
    is_filled = shift is lax.shift_right_arithmetic
    return found if is_filled else lax.select(is_far, jnp.zeros_like(x), found)


def to_integers(p: Params, x: Value) -> Value:
    """Floats as integers of fewer than 32 bits: the nearest one, and 0 of NaN."""
    info, is_narrow = jnp.iinfo(p["new_dtype"]), x.dtype.itemsize < 4
    x = x.astype(np.float32) if is_narrow else x
    low, high = (lax.full_like(x, n) for n in (info.min, info.max))
    inside = lax.clamp(low, jnp.where(is_nan(x), lax.full_like(x, 0), x), high)
    return inside.astype(np.int32).astype(info.dtype)


def least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype.kind == "b" else jnp.iinfo(dtype).min


def greatest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf
    return True if dtype.kind == "b" else jnp.iinfo(dtype).max


def bits_of(x: Value) -> Value:
    """The bits of numbers, as integers with a sign: others have too large constants."""
    size = np.dtype(x.dtype).itemsize
    return lax.bitcast_convert_type(x, np.dtype(f"int{8 * size}"))


def top_of(bits: Value) -> Value:
    """The sign of integers, alone."""
    return bits & lax.full_like(bits, jnp.iinfo(bits.dtype).min)


def in_total_order(x: Value) -> Value:
    """Integers with a sign, in the order of floats in which -0 < 0 < inf < NaN."""
    bits = bits_of(x)
    low = lax.full_like(bits, np.iinfo(bits.dtype).max)
    return jnp.where(bits < lax.full_like(bits, 0), bits ^ low, bits)


def _ordered(compare: Callable[..., Value]) -> Any:
    def of(_: Params, x: Value, y: Value) -> Value:
        if not _is_float(x):
            return compare(x, y)
        return compare(in_total_order(x), in_total_order(y))

    return of


def _next_after(_: Params, x: Value, y: Value) -> Value:
    # By their bits: processors may take subnormal numbers for zeros.
    a, b = map(bits_of, (x, y))
    size, other = (bits ^ top_of(bits) for bits in (a, b))
    one, zero = lax.full_like(a, 1), lax.full_like(a, 0)
    shrinks = (size > other) | (top_of(a) != top_of(b))
    moved = jnp.where(shrinks, a - one, a + one)
    moved = jnp.where(size == zero, top_of(b) | one, moved)
    is_same = (a == b) | ((size | other) == zero)
    found = lax.bitcast_convert_type(jnp.where(is_same, b, moved), x.dtype)
    return jnp.where(is_nan(x) | is_nan(y), lax.full_like(x, jnp.nan), found)


def _reduced_precision(p: Params, x: Value) -> Value:
    """Rounds the mantissa to even, then drops what is beyond the exponents (as XLA)."""
    info, bits = jnp.finfo(x.dtype), bits_of(x)
    of = lambda n: lax.full_like(bits, n)
    if (cut := info.nmant - p["mantissa_bits"]) > 0:
        is_odd = (bits >> of(cut)) & of(1)
        bits = (bits + is_odd + of((1 << (cut - 1)) - 1)) & ~of((1 << cut) - 1)
    if p["exponent_bits"] < info.nexp:
        bias, reduced = ((1 << (n - 1)) - 1 for n in (info.nexp, p["exponent_bits"]))
        mask = of(((1 << info.nexp) - 1) << info.nmant)
        size, sign = bits & mask, top_of(bits)
        bits = jnp.where(size > of((bias + reduced) << info.nmant), sign | mask, bits)
        bits = jnp.where(size <= of((bias - reduced) << info.nmant), sign, bits)
    return jnp.where(is_nan(x), x, lax.bitcast_convert_type(bits, x.dtype))


def bitcast(p: Params, x: Value) -> Value:
    """Numbers as others of another width, the lowest bits first."""
    old, new = (np.dtype(d).itemsize for d in (x.dtype, p["new_dtype"]))
    if old == new:
        return lax.bitcast_convert_type(x, p["new_dtype"])
    narrow, wide = (np.dtype(f"uint{8 * n}") for n in sorted((old, new)))
    shift = lambda i: np.array(8 * min(old, new) * i, wide)
    x = lax.bitcast_convert_type(x, np.dtype(f"uint{8 * old}"))
    if new < old:
        parts = [
            lax.shift_right_logical(x, jnp.full_like(x, shift(i)))
            for i in range(old // new)
        ]
        x = lax.concatenate([part.astype(narrow)[..., None] for part in parts], x.ndim)
    else:
        parts = [x[..., i].astype(wide) << shift(i) for i in range(new // old)]
        x = functools.reduce(lax.bitwise_or, parts)
    return lax.bitcast_convert_type(x, p["new_dtype"])


def _polynomial(x: Value, coefficients: Sequence[Any]) -> Value:
    y = lax.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = y * x + lax.full_like(x, c)
    return y


# The approximations that XLA uses for float32.
_ERF_TOP = (
    0.00022905065861350646,
    0.0034082910107109506,
    0.050955695062380861,
    0.18520832239976145,
    1.128379143519084,
)
_ERF_BOTTOM = (
    -1.1791602954361697e-7,
    0.000023547966471313185,
    0.0010179625278914885,
    0.014070470171167667,
    0.11098505178285362,
    0.49746925110067538,
    1.0,
)


def erf(x: Value) -> Value:
    """The error function of float32."""
    x = jnp.minimum(jnp.maximum(x, jnp.float32(-3.7439211)), jnp.float32(3.7439211))
    square = x * x
    return x * _polynomial(square, _ERF_TOP) / _polynomial(square, _ERF_BOTTOM)


# Cephes, ndtrf.c: for arguments from 1 to 2, and beyond.
_ERFC_NEAR = (
    2.326819970068386e-2,
    -1.387039388740657e-1,
    3.687424674597105e-1,
    -5.824733027278666e-1,
    6.210004621745983e-1,
    -4.944515323274145e-1,
    3.404879937665872e-1,
    -2.741127028184656e-1,
    5.638259427386472e-1,
)
_ERFC_FAR = (
    -1.047766399936249e1,
    1.297719955372516e1,
    -7.495518717768503,
    2.921019019210786,
    -1.015265279202700,
    4.218463358204948e-1,
    -2.820767439740514e-1,
    5.641895067754075e-1,
)


def erfc(x: Value) -> Value:
    """What the error function of float32 lacks to 1."""
    size = jnp.abs(x)
    q = 1 / lax.max(size, lax.full_like(x, 0.5))
    y = q * q
    p = jnp.where(size < 2, _polynomial(y, _ERFC_NEAR), _polynomial(y, _ERFC_FAR))
    tail = jnp.exp(-size * size) * q * p
    return jnp.where(size < 1, 1 - erf(x), jnp.where(x < 0, 2 - tail, tail))


# Giles, Approximating the erfinv function, 2010.
_NEAR = (
    2.81022636e-08,
    3.43273939e-07,
    -3.5233877e-06,
    -4.39150654e-06,
    0.00021858087,
    -0.00125372503,
    -0.00417768164,
    0.246640727,
    1.50140941,
)
_FAR = (
    -0.000200214257,
    0.000100950558,
    0.00134934322,
    -0.00367342844,
    0.00573950773,
    -0.0076224613,
    0.00943887047,
    1.00167406,
    2.83297682,
)


def erf_inv(x: Value) -> Value:
    """The inverse of the error function of float32."""
    w = -jnp.log1p(-x * x)
    near = _polynomial(w - jnp.float32(2.5), _NEAR)
    far = _polynomial(jnp.sqrt(w) - jnp.float32(3.0), _FAR)
    y = jnp.where(w < jnp.float32(5.0), near, far) * x
    ends = jnp.abs(x) == jnp.float32(1.0)
    return jnp.where(ends, x * jnp.float32(jnp.inf), y)


def _round(p: Params, x: Value) -> Value:
    """Rounds to integers: halves away from zero, or to even ones."""
    size = jnp.abs(x)
    low = jnp.floor(size)
    rest, half = size - low, lax.full_like(x, 0.5)
    up = rest >= half
    if p["rounding_method"] is lax.RoundingMethod.TO_NEAREST_EVEN:
        is_odd = low - 2 * jnp.floor(low * half) == 1
        up = (rest > half) | ((rest == half) & is_odd)
    found = jnp.where(up, low + 1, low)
    return jnp.where(bits_of(x) == bits_of(size), found, -found)


# Lanczos, with g = 7, for arguments above 1/2; others by reflection.
_LANCZOS = (
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)
_LANCZOS_FIRST = 0.99999999999980993227684700473478


# The series of `lgamma` at 2, by zeta(k) - 1.
_ZETAS = {k: sum(i**-k for i in range(2, 4000)) for k in range(13, 2, -1)}
_AT_TWO = [(-1) ** k / k * zeta for k, zeta in _ZETAS.items()]
_AT_TWO += [math.pi**2 / 12 - 0.5, 1 - np.euler_gamma, 0.0]


def _lanczos(x: Value) -> tuple[Value, Value, Value, Value]:
    """The argument, the sum and its derivative, and the logarithm of `z + 7.5`."""
    z = jnp.where(x < 0.5, -x, x - 1)
    total, slope = lax.full_like(x, _LANCZOS_FIRST), lax.full_like(x, 0)
    for i, c in enumerate(_LANCZOS):
        c, at = lax.full_like(x, c), z + (i + 1)
        total, slope = total + c / at, slope - c / (at * at)
    return z, total, slope, math.log(7.5) + jnp.log1p(z / 7.5)


def lgamma(x: Value) -> Value:
    """The logarithm of the gamma function's absolute value."""
    z, total, _, log = _lanczos(x)
    value = 0.5 * math.log(2 * math.pi) + (z + 0.5 - (z + 7.5) / log) * log
    value = value + jnp.log(total)
    if x.dtype == np.float32:  # XLA is exact at the zeros of this type alone
        is_low = z < 0.5
        near = _polynomial(jnp.where(is_low, z, z - 1), _AT_TWO)
        near = near - jnp.where(is_low, jnp.log1p(z), 0)
        value = jnp.where(z < 1.5, near, value)
    frac = jnp.abs(x) - jnp.floor(jnp.abs(x))
    frac = jnp.where(frac > 0.5, 1 - frac, frac)
    sine = jnp.log(jnp.sin(math.pi * frac))
    reflected = math.log(math.pi) - sine - value
    reflected = jnp.where(jnp.abs(sine) < jnp.inf, reflected, -sine)
    found = jnp.where(x < 0.5, reflected, value)
    return jnp.where(jnp.abs(x) == jnp.inf, lax.full_like(x, jnp.inf), found)


def digamma(x: Value) -> Value:
    """The derivative of `lgamma`."""
    z, total, slope, log = _lanczos(x)
    value = log + slope / total - 7 / (z + 7.5)
    angle = math.pi * (x + jnp.abs(jnp.floor(x + 0.5)))
    reflected = value - math.pi * jnp.cos(angle) / jnp.sin(angle)
    found = jnp.where(x < 0.5, reflected, value)
    pole = jnp.where(x == 0, lax.full_like(x, -jnp.inf), lax.full_like(x, jnp.nan))
    return jnp.where((x <= 0) & (x == jnp.floor(x)), pole, found)


# Of floats, and of integers. What is in neither table each backend has for them.
FLOATS: dict[str, Rule] = {
    "max": lambda p, x, y: _maximum(x, y),
    "min": lambda p, x, y: _minimum(x, y),
    "neg": lambda p, x: x * lax.full_like(x, -1),
    "sign": lambda p, x: _sign(x),
    "erf": lambda p, x: erf(x),
    "erfc": lambda p, x: erfc(x),
    "erf_inv": lambda p, x: erf_inv(x),
    "round": _round,
    "lgamma": lambda p, x: lgamma(x),
    "digamma": lambda p, x: digamma(x),
    "nextafter": _next_after,
    "reduce_precision": _reduced_precision,
    "logistic": lambda p, x: 1 / (1 + jnp.exp(-x)),
    "is_finite": lambda p, x: jnp.abs(x) < lax.full_like(x, jnp.inf),
}
INTEGERS: dict[str, Rule] = {
    "sign": lambda p, x: _sign(x),
    "not": lambda p, x: -x - lax.full_like(x, 1),
    "population_count": lambda p, x: _counted(lax.population_count, x, 0),
    "clz": lambda p, x: _counted(lax.clz, x, 1),
}
BOOLS: dict[str, Rule] = {
    "max": lambda p, x, y: x | y,
    "min": lambda p, x, y: x & y,
}
ALL: dict[str, Rule] = {
    "square": lambda p, x: lax.mul(x, x),
    "one_minus_square": lambda p, x: (1 - x) * (1 + x),
    "clamp": lambda p, low, x, high: lax.min(lax.max(_like(low, x), x), _like(high, x)),
    "polynomial": lambda p, x, *c: functools.reduce(lambda y, a: y * x + a, c[::-1]),
    "eq_to": _ordered(lax.eq),
    "le_to": _ordered(lax.le),
    "lt_to": _ordered(lax.lt),
}


# What a backend has of integers, where it would not trap and is defined.
GUARDED: dict[str, Rule] = {
    "div": lambda x, y: _divided(x, y, lax.div, lambda x: jnp.zeros_like(x) - 1),
    "rem": lambda x, y: _divided(x, y, lax.rem, lambda x: x),
    "shift_left": lambda x, n: _shifted(x, n, lax.shift_left),
    "shift_right_logical": lambda x, n: _shifted(x, n, lax.shift_right_logical),
    "shift_right_arithmetic": lambda x, n: _shifted(x, n, lax.shift_right_arithmetic),
}


def _like(x: Value, other: Value) -> Value:
    return x if x.shape == other.shape else lax.broadcast(x, other.shape)
