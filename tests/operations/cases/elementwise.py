"""Operations on each entry by itself, on all pairs of special numbers."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..case import Case
from ..values import ALL, COMPLEX, FLOATS, INTEGERS, dtype_of, mixed, paired

# By the number of operands; the names that `lax` has for them, where these are others.
_NAMES = {"not": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or"}
_NAMES |= {"xor": "bitwise_xor", "igamma_grad_a": "igamma_grad_a"}
_OPERATIONS = {
    1: """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj
    cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log
    log1p log2 logistic neg not optimization_barrier population_count real rsqrt sign
    sin sinh sqrt square stop_gradient tan tanh""",
    2: """add and atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min
    mul mulhi ne nextafter or polygamma pow rem shift_left shift_right_arithmetic
    shift_right_logical sub xor zeta""",
    3: "clamp",
}
# Whose results are far from exact where they are steep.
_ULPS = {"igamma": 64, "igammac": 64, "igamma_grad_a": 256, "zeta": 64}
_ULPS |= {"polygamma": 256, "lgamma": 32, "digamma": 32}
# Those that say how exact they are to be.
_ACCURATE = [
    "cbrt",
    "cos",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "rsqrt",
    "sin",
    "sqrt",
    "tan",
    "tanh",
]


def cases() -> Iterator[Case]:
    for count, names in _OPERATIONS.items():
        for name in names.split():
            if (f := getattr(lax, _NAMES.get(name, name), None)) is None:
                continue  # this JAX has none
            for dtype in ALL:
                if (name, dtype) != ("clamp", "bool"):  # which XLA has not
                    args = paired(*(count * [dtype]))
                    if (left_out := _LEFT_OUT.get(name)) and dtype in FLOATS:
                        nine = dtype_of(dtype).type(9)
                        args = [np.where(left_out(x), nine, x) for x in args]
                    yield Case(name, "", f, args, _ULPS.get(name))
    yield from _with_parameters()
    yield from _types()
    yield from _others()


def _is_huge(x: Any) -> Any:
    return np.isfinite(x) & (np.abs(x) > 1e4)


def _is_subnormal(x: Any) -> Any:
    return (np.abs(x) < jnp.finfo(x.dtype).tiny) & (x != 0)


# JAX's own loop for `igamma` has no end for two huge numbers. In some programs a
# subnormal one is 0: there `lgamma` is infinite, and `nextafter` the other number.
_LEFT_OUT = {"igamma": _is_huge, "lgamma": _is_subnormal, "nextafter": _is_subnormal}


def _with_parameters() -> Iterator[Case]:
    highest = lax.AccuracyMode.HIGHEST
    for name in _ACCURATE:
        if (of := getattr(lax, name, None)) is not None:
            f = functools.partial(of, accuracy=highest)
            yield Case(name, "accuracy=HIGHEST", f, paired("float32"))
    for power, dtype in itertools.product(
        (-3, -1, 0, 1, 2, 5), ("bfloat16", "float32", "float64", "int32", "complex64")
    ):
        f = functools.partial(lax.integer_pow, y=power)
        # Where a power of a complex number overflows, LLVM decides what is NaN.
        has_slope = (power, dtype) != (-3, "complex64")
        yield Case("integer_pow", f"y={power}", f, paired(dtype), 16, has_slope)
    for method, dtype in itertools.product(lax.RoundingMethod, FLOATS):
        f = functools.partial(lax.round, rounding_method=method)
        yield Case("round", method.name, f, paired(dtype))
    for (e, m), dtype in itertools.product(
        ((8, 7), (5, 10), (5, 2), (4, 3), (11, 52), (2, 30), (8, 23), (1, 0), (8, 0)),
        FLOATS,
    ):
        f = functools.partial(lax.reduce_precision, exponent_bits=e, mantissa_bits=m)
        yield Case("reduce_precision", f"{e}, {m}", f, paired(dtype))
    for dtype, out in (("float32", "float64"), ("bfloat16", "float32")):
        for name in ("add", "sub", "mul"):

            def wide(x: Any, y: Any, name: str = name, out: str = out) -> Any:
                return getattr(lax, name)(x, y, out_dtype=out)

            yield Case(name, f"out_dtype={out}", wide, paired(dtype, dtype))
    for dtype in ("float32", "complex64", "float64"):
        f = functools.partial(lax.conj, input_dtype=dtype)
        yield Case("conj", f"input_dtype={dtype}", f, paired("complex64"))
    for dtype in ("float32", "int32"):
        scalar = lambda x: lax.clamp(
            jnp.asarray(1, x.dtype), x, jnp.asarray(3, x.dtype)
        )
        yield Case("clamp", "scalar bounds", scalar, paired(dtype))
    for dtype in FLOATS:
        total = lambda x, y: lax.eq_to_p.bind(x, y)
        for name in ("eq_to", "le_to", "lt_to"):
            bind = getattr(lax, f"{name}_p", None)
            total = lambda x, y, bind=bind: bind.bind(x, y)
            yield Case(name, "", total, paired(dtype, dtype))
    yield Case(
        "add_any",
        "",
        lambda x, y: lax.add_p and _add_any(x, y),
        paired("float32", "float32"),
    )
    for a, b, c in (("float32",) * 3, ("int32",) * 3):
        many = lambda *xs: lax.optimization_barrier(xs)
        yield Case("optimization_barrier", "many", many, paired(a, b, c))
    for length in (1, 2, 4):
        f = lambda x, length=length: jnp.polyval(jnp.asarray(range(length), x.dtype), x)
        if hasattr(lax, "polynomial_p"):
            g = lambda x, n=length: lax.polynomial_p.bind(x, *[x] * n)
            yield Case("polynomial", f"{length} coefficients", g, paired("float32"))
    if hasattr(lax, "one_minus_square_p"):
        for dtype in FLOATS:
            f = lambda x: lax.one_minus_square_p.bind(x)
            yield Case("one_minus_square", "", f, paired(dtype))
    beta = lambda a, b, x: lax.betainc(jnp.abs(a) + 0.1, jnp.abs(b) + 0.1, x)
    for dtype in FLOATS:
        args = paired(dtype, dtype, dtype)
        yield Case("regularized_incomplete_beta", "", beta, args, 256)


def _add_any(x: Any, y: Any) -> Any:
    # As JAX adds up cotangents of what is used twice.
    return jax.vjp(lambda z: (z * 1, z * 1), x)[1]((x, y))[0]


def _types() -> Iterator[Case]:
    """From each type to each."""
    for a, b in itertools.product(ALL, ALL):
        f = functools.partial(lax.convert_element_type, new_dtype=b)
        if a != b:
            yield Case("convert_element_type", f"to {b}", f, paired(a))
        if not {a, b} & {*COMPLEX, "bool"}:
            f = functools.partial(lax.bitcast_convert_type, new_dtype=b)
            args = (
                mixed(a, 3, 2)
                if np.dtype(_wide(a)) != np.dtype(_wide(b))
                else paired(a)[0]
            )
            yield Case("bitcast_convert_type", f"to {b}", f, (_as_bits(args, a, b),))


def _wide(name: str) -> str:
    return f"u{jnp.dtype(name).itemsize}"


def _as_bits(x: Any, a: str, b: str) -> Any:
    ratio = jnp.dtype(b).itemsize // jnp.dtype(a).itemsize
    return np.resize(x, (*x.shape[:-1], ratio)) if ratio > 1 else x


def _others() -> Iterator[Case]:
    for dtype in ALL:
        choose = lambda which, *xs: lax.select_n(which, *xs)
        yield Case("select_n", "two", choose, paired("bool", dtype, dtype))
        which = np.array([[0, 1, 2, 1], [2, 0, -1, 3], [1, 0, 2, 5]] * 2, "int32")
        three = [mixed(dtype, 4) for _ in range(3)]
        yield Case("select_n", "three", choose, (which, *three))
        one = lambda which, *xs: lax.select_n(which[0], *xs)
        yield Case("select_n", "for all", one, (which % 2 == 0, *three[:2]))
        yield Case(
            "copy",
            "",
            lax.copy_p.bind if hasattr(lax, "copy_p") else jnp.copy,
            paired(dtype),
        )
        yield Case("device_put", "", jax.device_put, paired(dtype))
        yield Case("copy_p", "", jnp.copy, paired(dtype))
    name = lambda x: jax.ad_checkpoint.checkpoint_name(x, "a name")
    yield Case("name", "", name, paired("float32"))
    for dtype in INTEGERS:
        for impl in ("threefry2x32",) if dtype == "uint32" else ():
            f = lambda a, b, c, d: jax.extend.random.threefry2x32_p.bind(a, b, c, d)
            yield Case("threefry2x32", impl, f, paired(*(4 * ["uint32"])))
