"""Random numbers and their keys."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax

from ..case import Case
from ..values import keys, mixed, plain

_IMPLS = (
    "threefry2x32",
    "rbg",
    "unsafe_rbg",
    *(
        impl
        for impl in ("philox4x32", "philox2x32", "threefry4x32")
        if impl in str(getattr(jax.random, "__dict__", ()))
    ),
)


def cases() -> Iterator[Case]:
    for impl in _IMPLS:
        key = [keys(impl)]
        for bits, shape in (
            (8, (3,)),
            (16, (3,)),
            (32, (3,)),
            (64, (2,)),
            (32, (2, 3)),
            (32, ()),
        ):
            f = functools.partial(jax.random.bits, shape=shape, dtype=f"uint{bits}")
            yield Case("random_bits", f"{bits} {shape} {impl}", f, key)
        for shape in (2, 3, (2, 2)):
            f = functools.partial(jax.random.split, num=shape)
            yield Case("random_split", f"{shape} {impl}", f, key)
        for dtype in ("uint32", "int32", "int64", "uint8"):
            f = lambda k, i: jax.random.fold_in(k, i)
            yield Case("random_fold_in", f"{dtype} {impl}", f, [*key, mixed(dtype)])
        yield Case("random_unwrap", impl, jax.random.key_data, key)
        wrap = lambda data, impl=impl: jax.random.wrap_key_data(data, impl=impl)
        yield Case("random_wrap", impl, wrap, [np.asarray(jax.random.key_data(key[0]))])
        for dtype in ("uint32", "int32", "int64"):
            seed = functools.partial(jax.random.key, impl=impl)
            yield Case("random_seed", f"{dtype} {impl}", seed, [mixed(dtype)])
        yield Case("random_clone", impl, jax.random.clone, key)
        many = lambda k: jax.vmap(jax.random.bits)(k)
        yield Case("random_bits", f"many {impl}", many, [keys(impl, 3)])
        yield Case(
            "random_unwrap", f"many {impl}", jax.random.key_data, [keys(impl, 3)]
        )
    alphas = np.abs(plain("float32", 3)) + 0.3
    for log in (True, False):
        draw = jax.random.loggamma if log else jax.random.gamma
        yield Case(
            "random_gamma", f"log={log}", draw, [keys("threefry2x32"), alphas], 64
        )
    for dtype in ("uint32", "uint64", "uint8", "uint16"):
        for how in lax.RandomAlgorithm:
            f = lambda k, d=dtype, a=how: lax.rng_bit_generator(k, (3,), d, a)
            yield Case("rng_bit_generator", f"{dtype} {how}", f, [plain("uint32", 4)])
    f = lambda k: lax.rng_bit_generator(k, (2, 3))
    yield Case("rng_bit_generator", "", f, [plain("uint64", 2)])
    f = lambda a, b: lax.rng_uniform(a, b, (2,)) * 0
    yield Case("rng_uniform", "", f, [plain("float32"), plain("float32") + 9])
    f = lambda a, b: lax.rng_uniform(a, b, (3, 1)) * 0
    yield Case("rng_uniform", "", f, [plain("float32"), plain("float32") + 9])
    for dtype in ("float32", "bfloat16", "float64"):
        f = functools.partial(jax.random.normal, shape=(3,), dtype=dtype)
        yield Case("erf_inv", f"normal {dtype}", f, [keys("threefry2x32")])
