"""Numbers of all types, with the special ones of each among them."""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FLOATS = "bfloat16", "float16", "float32", "float64"
COMPLEX = "complex64", "complex128"
SIGNED = "int8", "int16", "int32", "int64"
UNSIGNED = "uint8", "uint16", "uint32", "uint64"
INTEGERS = (*SIGNED, *UNSIGNED)
ALL = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
# One of each kind.
KINDS = "bool", "int32", "uint32", "float32", "complex64"

# Rows that each array has, and what a step of a loop reads of it.
ROWS, STEPS = 6, 2

Array = Any


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def dtype_of(name: Any) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name) if isinstance(name, str) else name)


@functools.cache
def specials(name: str) -> np.ndarray:
    """The special numbers of a type, and some that are not."""
    dtype = dtype_of(name)
    if dtype.kind == "b":
        return np.array([False, True])
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        few = [0, 1, 2, 3, 7, info.max, info.max - 1, info.min, info.min + 1]
        few += [] if info.min == 0 else [-1, -2, -3, -7]
        return np.array(few, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        of = "float32" if dtype == np.complex64 else "float64"
        parts = [0.0, -0.0, 1.0, -1.5, 0.75, math.inf, -math.inf, math.nan]
        pairs = [complex(a, b) for a in parts for b in parts]
        tiny, most = float(jnp.finfo(of).tiny), float(jnp.finfo(of).max)
        pairs += [complex(tiny, 1), complex(most, 1), complex(1, most), 3 + 4j]
        return np.array(pairs, dtype)
    info = jnp.finfo(dtype)
    tiny, most = float(info.tiny), float(info.max)
    few = [0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 3.0, 7.3, 20.0, 100.5]
    few += [float(info.eps), tiny, most, math.inf, tiny / 4]
    return np.array([*few, *(-x for x in few), math.nan], np.float64).astype(dtype)


def _rng(*key: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def plain(name: str, *shape: int, rows: int = ROWS, low: float = -2.0) -> np.ndarray:
    """Numbers of no special kind, between `low` and 2, one array a row."""
    dtype, rng = dtype_of(name), _rng(name, shape)
    size = rows, *shape
    if dtype.kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        least = max(int(jnp.iinfo(dtype).min), -5)
        return rng.integers(least, 9, size).astype(dtype)
    x = rng.uniform(low, 2.0, size)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.uniform(low, 2.0, size)
    return x.astype(dtype)


def mixed(name: str, *shape: int, rows: int = ROWS) -> np.ndarray:
    """Plain numbers in the first rows, and special ones among them in the others."""
    x, rng = plain(name, *shape, rows=rows), _rng("mixed", name, shape)
    is_special = rng.random(x.shape) < 0.5
    is_special[: rows // 3] = False
    # Those with equal entries, too.
    return np.where(is_special, rng.choice(specials(name), x.shape), x)


def paired(*names: str, width: int = 4) -> tuple[np.ndarray, ...]:
    """Each special number with each of the others, `width` of them a row."""
    few = [specials(name) for name in names]
    if len(names) > 1:
        # Not all of the many complex ones.
        few = [x[:: max(1, len(x) // 34)] for x in few]
    if len(names) > 2:
        few = [x[:: max(1, len(x) // 8)] for x in few]
    grid = np.meshgrid(*few, indexing="ij")
    flat = [x.reshape(-1) for x in grid]
    count = -(-flat[0].size // width) * width
    return tuple(np.resize(x, count).reshape(-1, width) for x in flat)


def indices(
    name: str, *shape: int, limit: int, rows: int = ROWS, wild: bool = True
) -> np.ndarray:
    """Indices below a limit, in the later rows negative and out of bounds, too."""
    dtype, rng = dtype_of(name), _rng("indices", name, shape, limit)
    x = rng.integers(0, limit, (rows, *shape))
    if wild:
        info = jnp.iinfo(dtype)
        few = [-1, -limit, -limit - 1, limit, limit + 3, info.max, info.min, limit - 1]
        few = [i for i in few if info.min <= i <= info.max]
        is_wild = rng.random(x.shape) < 0.6
        is_wild[: rows // 2] = False
        x = np.where(is_wild, rng.choice(np.array(few, object), x.shape), x)
    return x.astype(object).astype(dtype)


def keys(impl: str, *shape: int, rows: int = ROWS) -> jax.Array:
    size = math.prod((rows, *shape))
    made = jax.vmap(lambda i: jax.random.key(i, impl=impl))(np.arange(size, dtype="u4"))
    return made.reshape(rows, *shape)


def in_steps(x: Array) -> Array:
    """What the steps of a loop read: the rows, and these in another order."""
    return jnp.stack([jnp.roll(x, i, 0) for i in range(STEPS)])
