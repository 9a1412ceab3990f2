"""Identities for every dtype: programs keep every bit, compiled as they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqloop import ir

from ..compiling import AS_USED
from ..marks import slow_if

pytestmark = pytest.mark.sampled

FLOATS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int32", "int8"]
UNSIGNED = ["uint32", "uint8"]
SPECIALS = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 1e-40, 3e38, 6e-8, 0.3, -448]
RANDOM = np.random.default_rng(0).normal(size=(2, 52))


@np.errstate(over="ignore")
def values(dtype):
    if jnp.issubdtype(dtype, jnp.complexfloating):
        pairs = np.array([[complex(x, y) for x in SPECIALS] for y in SPECIALS])
        return np.concatenate([pairs.ravel(), RANDOM[0] + 1j * RANDOM[1]]).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.concatenate([SPECIALS, 9 * RANDOM[0]]).astype(dtype)
    if dtype == "bool":
        return np.array([True, False] * 32)
    limits = jnp.iinfo(dtype)
    ends = [limits.min, limits.max, 0, 1]
    inside = np.linspace(int(limits.min), int(limits.max), 60).astype(np.int64)
    return np.concatenate([ends, inside]).astype(dtype)


def number(x, value):
    return lax.full_like(x, value)


def chosen(which):
    return lambda x: lax.select_n(jnp.full(x.shape, which), x, x[::-1], number(x, 1))


ANY = {
    "select": lambda x: lax.select_n(x == x, x, x),
    "known select": lambda x: lax.select_n(np.ones(x.shape, bool), x[::-1], x),
    **{f"case {i}": chosen(np.int32(i)) for i in (-3, 0, 1, 2, 7)},
    "reversed twice": lambda x: x[::-1][::-1],
    "reshaped twice": lambda x: x.reshape(4, -1).reshape(x.shape),
    "transposed twice": lambda x: x.reshape(4, -1).T.T,
    "same type": lambda x: lax.convert_element_type(x, x.dtype),
    "whole": lambda x: lax.dynamic_slice(x, (jnp.int32(3),), x.shape),
    "joined to nothing": lambda x: lax.concatenate([x, x[:0]], 0),
}
NUMBERS = {
    "x * 1": lambda x: x * number(x, 1),
    "1 * x": lambda x: number(x, 1) * x,
    "x + 0": lambda x: x + number(x, 0),
    "x - 0": lambda x: x - number(x, 0),
    "0 - x": lambda x: number(x, 0) - x,
    "x / 1": lambda x: lax.div(x, number(x, 1)),
    "x * 0": lambda x: x * number(x, 0),
    "x - x": lambda x: x - x,
    "--x": lambda x: lax.neg(lax.neg(x)),
    "sign of sign": lambda x: lax.sign(lax.sign(x)),
    "x ** 1": lambda x: lax.integer_pow(x, 1),
    "sum of nothing": lambda x: lax.reduce_sum_p.bind(x, axes=(), out_sharding=None),
    "the same sum": lambda x: (x + x[::-1], x[::-1] + x),
    "the same product": lambda x: (x * x[::-1], x[::-1] * x),
}
ORDERED = {
    "max": lambda x: lax.max(x, x),
    "min": lambda x: lax.min(x, x),
    "clamped": lambda x: lax.clamp(number(x, 1), x, number(x, 0)),
}
SIGNED = {"abs of abs": lambda x: lax.abs(lax.abs(x))}
REAL = {
    "x + -0.0": lambda x: x + number(x, -0.0),
    "x - -0.0": lambda x: x - number(x, -0.0),
    "floor of floor": lambda x: lax.floor(lax.floor(x)),
    "ceil of ceil": lambda x: lax.ceil(lax.ceil(x)),
    "pow": lambda x: lax.pow(x, number(x, 1)),
    "wider": lambda x: x.astype(jnp.float32).astype(x.dtype),
    "by way of wider": lambda x: [
        x.astype(jnp.float32).astype(dtype) for dtype in (*FLOATS, "int8", "bool")
    ],
}
COMPLEX = {
    "conjugated twice": lambda x: lax.conj(lax.conj(x)),
    "parts": lambda x: lax.real(lax.complex(lax.imag(x), lax.real(x))),
}
BITS = {
    "and": lambda x: lax.bitwise_and(x, x),
    "or": lambda x: lax.bitwise_or(x, x),
    "not": lambda x: lax.bitwise_not(lax.bitwise_not(x)),
    "xor": lambda x: lax.bitwise_xor(x, number(x, 0)),
}
SHIFTS = {
    "left": lambda x: lax.shift_left(x, number(x, 0)),
    "right": lambda x: lax.shift_right_logical(x, number(x, 0)),
    "right, signed": lambda x: lax.shift_right_arithmetic(x, number(x, 0)),
    "by way of wider": lambda x: [
        x.astype(wide).astype(dtype)
        for wide in (jnp.int32, jnp.uint32)
        for dtype in (*INTEGERS, *UNSIGNED, "float16")
    ],
}
PROGRAMS = {
    **dict.fromkeys(FLOATS, ANY | NUMBERS | ORDERED | SIGNED | REAL),
    **dict.fromkeys(UNSIGNED, ANY | NUMBERS | ORDERED | BITS | SHIFTS),
    **dict.fromkeys(INTEGERS, ANY | NUMBERS | ORDERED | SIGNED | BITS | SHIFTS),
    "int4": ANY | NUMBERS,
    "complex64": ANY | NUMBERS | SIGNED | COMPLEX,
    "bool": ANY | BITS,
}


def bits(x):
    """The bytes of an array, with all NaNs the same."""
    x = np.asarray(x)
    parts = [x.real, x.imag] if np.iscomplexobj(x) else [x]
    return [
        np.where(part != part, part.dtype.type(0), part).tobytes() for part in parts
    ]


# Each of these is like another one of its kind.
LIKE_OTHERS = {"float8_e5m2", "uint8", "uint32", "float16", "int8"}


@pytest.mark.parametrize("dtype", slow_if(LIKE_OTHERS.__contains__, PROGRAMS))
def test_every_bit_for_every_dtype(dtype):
    programs = PROGRAMS[dtype]
    x = jnp.asarray(values(dtype))

    def run(x):
        return {name: (f(x), ir.Optimize(f)(x)) for name, f in programs.items()}

    compiled = jax.jit(run, compiler_options=AS_USED)
    for name, (expected, found) in compiled(x).items():
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
        for before, after in pairs:
            assert before.dtype == after.dtype
            assert bits(after) == bits(before), name
            same = np.asarray(before != before) == np.asarray(after != after)
            assert same.all(), name
