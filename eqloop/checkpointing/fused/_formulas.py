"""Functions that no backend of Pallas has, written in those that all have."""

import math

import jax.numpy as jnp
from jax import lax

from ..._types import Value

# The rotations of threefry, and the constant of its key schedule.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry(k0: Value, k1: Value, x0: Value, x1: Value) -> tuple[Value, Value]:
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
    return x0, x1


def _polynomial(x: Value, coefficients: tuple[float, ...]) -> Value:
    y = jnp.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = y * x + jnp.asarray(c, x.dtype)
    return y


def _in_float32(f):
    """Narrower floats are computed with in float32."""

    def run(x: Value) -> Value:
        return f(x.astype(jnp.float32)).astype(x.dtype)

    return run


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


@_in_float32
def erf(x: Value) -> Value:
    """The error function of float32."""
    x = jnp.minimum(jnp.maximum(x, jnp.float32(-3.7439211)), jnp.float32(3.7439211))
    square = x * x
    return x * _polynomial(square, _ERF_TOP) / _polynomial(square, _ERF_BOTTOM)


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


@_in_float32
def erf_inv(x: Value) -> Value:
    """The inverse of the error function of float32."""
    w = -jnp.log1p(-x * x)
    near = _polynomial(w - jnp.float32(2.5), _NEAR)
    far = _polynomial(jnp.sqrt(w) - jnp.float32(3.0), _FAR)
    y = jnp.where(w < jnp.float32(5.0), near, far) * x
    ends = jnp.abs(x) == jnp.float32(1.0)
    return jnp.where(ends, x * jnp.float32(jnp.inf), y)


def round_half(x: Value, method: object) -> Value:
    """Rounds to integers: halves away from zero, or to even ones."""
    low = jnp.floor(x)
    rest = x - low
    if method is lax.RoundingMethod.TO_NEAREST_EVEN:
        half = jnp.asarray(0.5, x.dtype)
        is_odd = low - 2 * jnp.floor(low * half) == 1
        up = (rest > half) | ((rest == half) & is_odd)
        return jnp.where(up, low + 1, low)
    size = jnp.floor(jnp.abs(x) + jnp.asarray(0.5, x.dtype))
    return jnp.where(x < 0, -size, size)


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


def lgamma(x: Value) -> Value:
    """The logarithm of the gamma function's absolute value."""
    is_small = x < 0.5
    z = jnp.where(is_small, -x, x - 1)
    total = jnp.full_like(x, 0.99999999999980993227684700473478)
    for i, c in enumerate(_LANCZOS):
        total = total + jnp.asarray(c, x.dtype) / (z + (i + 1))
    t = z + 7.5
    value = (z + 0.5) * jnp.log(t) - t + jnp.log(total) + 0.5 * math.log(2 * math.pi)
    frac = jnp.abs(x) - jnp.floor(jnp.abs(x))
    reflected = jnp.log(math.pi / jnp.abs(jnp.sin(math.pi * frac))) - value
    return jnp.where(is_small, reflected, value)


def digamma(x: Value) -> Value:
    """The derivative of `lgamma`."""
    is_small = x < 0.5
    z = jnp.where(is_small, -x, x - 1)
    top, bottom = (
        jnp.zeros_like(x),
        jnp.full_like(x, 0.99999999999980993227684700473478),
    )
    for i, c in enumerate(_LANCZOS):
        c = jnp.asarray(c, x.dtype)
        top = top - c / ((z + (i + 1)) * (z + (i + 1)))
        bottom = bottom + c / (z + (i + 1))
    t = z + 7.5
    value = jnp.log(t) + top / bottom - 7 / t
    frac = x + jnp.abs(jnp.floor(x + 0.5))
    angle = math.pi * frac
    reflected = value - math.pi * jnp.cos(angle) / jnp.sin(angle)
    return jnp.where(is_small, reflected, value)


def is_nan_greater(a: Value, b: Value) -> Value:
    """Whether `a` is sorted behind `b`: numbers first, and NaN last."""
    greater = a > b
    if jnp.issubdtype(a.dtype, jnp.floating):
        greater = greater | ((a != a) & (b == b))
    return greater
