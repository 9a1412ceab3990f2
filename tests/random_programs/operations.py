"""The operations that a random step is made of, with their types.

A signature has a kind and a shape for each argument and result: `0` is a scalar, `N` a
vector, `NN` a square matrix, and `S` any shape, the same throughout.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback

import eqloop as el

Operation = tuple[str, Callable[..., Any]]

# What policies may call some of the values.
TAG = "tagged"


def _solve(a: Any, b: Any) -> Any:
    return jnp.linalg.solve(3 * jnp.eye(len(b), dtype=b.dtype) + jnp.tanh(a), b)


def _put(x: Any, i: Any, y: Any) -> Any:
    return lax.dynamic_update_slice(x, y[None], (i,))


PURE: dict[str, Operation] = {
    "sin": ("fS -> fS", jnp.sin),
    "tanh": ("fS -> fS", jnp.tanh),
    "gauss": ("fS -> fS", lambda x: jnp.exp(-x * x)),
    "log": ("fS -> fS", lambda x: jnp.log1p(x * x)),
    "sqrt": ("fS -> fS", lambda x: jnp.sqrt(1 + x * x)),
    "abs": ("fS -> fS", jnp.abs),
    "cube": ("fS -> fS", lambda x: x**3 / 4),
    "stop": ("fS -> fS", lax.stop_gradient),
    "relu": ("fS -> fS", jax.nn.relu),
    "logit": ("fS -> fS", lambda x: jax.nn.sigmoid(x) - 0.5),
    "clip": ("fS -> fS", lambda x: jnp.clip(x, -0.5, 0.7)),
    "add": ("fS fS -> fS", jnp.add),
    "sub": ("fS fS -> fS", jnp.subtract),
    "mul": ("fS fS -> fS", jnp.multiply),
    "max2": ("fS fS -> fS", jnp.maximum),
    "atan2": ("fS fS -> fS", lambda x, y: jnp.arctan2(x, 1 + y * y)),
    "pow": ("fS fS -> fS", lambda x, y: jnp.power(1.5 + jnp.sin(x), jnp.tanh(y))),
    "div": ("fS fS -> fS", lambda x, y: x / (1.5 + jnp.cos(y))),
    "scale": ("f0 fS -> fS", lambda a, x: a * x),
    "mean": ("fS -> f0", jnp.mean),
    "norm": ("fS -> f0", lambda x: jnp.sqrt(1 + jnp.sum(x * x))),
    "largest": ("fS -> f0", jnp.max),
    "prod": ("fS -> f0", lambda x: jnp.prod(jnp.cos(x))),
    "logsumexp": ("fS -> f0", jax.nn.logsumexp),
    "square": ("fN -> fNN", lambda x: jnp.stack([x] * len(x))),
    "dot": ("fN fN -> f0", jnp.dot),
    "outer": ("fN fN -> fNN", jnp.outer),
    "matvec": ("fNN fN -> fN", lambda a, x: jnp.tanh(a) @ x),
    "matmul": ("fNN fNN -> fNN", lambda a, b: jnp.tanh(a) @ b),
    "solve": ("fNN fN -> fN", _solve),
    "named": ("fS -> fS", lambda x: el.name(x, TAG)),
    "transpose": ("fNN -> fNN", jnp.transpose),
    "rows": ("fNN -> fN", lambda a: a.sum(1)),
    "convolve": ("fN fN -> fN", lambda x, y: jnp.convolve(x, y, mode="same") / 2),
    "cumsum": ("fN -> fN", jnp.cumsum),
    "cumprod": ("fN -> fN", lambda x: jnp.cumprod(jnp.cos(x))),
    "cummax": ("fN -> fN", lambda x: lax.cummax(x, axis=0)),
    "sort": ("fN -> fN", jnp.sort),
    "roll": ("fN -> fN", lambda x: jnp.roll(x, 1)),
    "argsort": ("fN -> iN", lambda x: jnp.argsort(x).astype(jnp.int32)),
    "argmax": ("fN -> i0", lambda x: jnp.argmax(x).astype(jnp.int32)),
    "sort2": ("fN fN -> fN", lambda x, y: lax.sort((x, y), num_keys=1)[1]),
    "softmax": ("fN -> fN", jax.nn.softmax),
    "take": ("fN i0 -> f0", lambda x, i: x[i % len(x)]),
    "gather": ("fN iN -> fN", lambda x, i: x[i % len(x)]),
    "put": ("fN i0 f0 -> fN", _put),
    "scatter_add": ("fN iN fN -> fN", lambda x, i, y: x.at[i % len(x)].add(y)),
    "scatter_max": ("fN iN fN -> fN", lambda x, i, y: x.at[i % len(x)].max(y)),
    "row": ("fNN i0 -> fN", lambda a, i: lax.dynamic_index_in_dim(a, i, 0, False)),
    "where": ("bS fS fS -> fS", jnp.where),
    "greater": ("fS fS -> bS", jnp.greater),
    "is_positive": ("fS -> bS", lambda x: x > 0),
    "not": ("bS -> bS", jnp.logical_not),
    "xor": ("bS bS -> bS", jnp.logical_xor),
    "any": ("bS -> b0", jnp.any),
    "count": ("bS -> i0", lambda b: jnp.sum(b, dtype=jnp.int32)),
    "congruence": ("iS -> iS", lambda i: (i * 3 + 1) % 7),
    "plus": ("iS iS -> iS", lambda i, j: (i + j) % 11),
    "is_odd": ("iS -> bS", lambda i: i % 2 == 1),
    "complex": ("fS fS -> cS", lax.complex),
    "real": ("cS -> fS", jnp.real),
    "imag": ("cS -> fS", jnp.imag),
    "length": ("cS -> fS", lambda z: jnp.sqrt(1 + jnp.real(z * jnp.conj(z)))),
    "cmul": ("cS cS -> cS", lambda z, w: z * w / (2 + jnp.abs(w) ** 2)),
    "conj": ("cS -> cS", jnp.conj),
    "turn": ("cS -> cS", lambda z: z * 1j),
    "minus": ("hS -> hS", jnp.negative),
    "hmax": ("hS hS -> hS", jnp.maximum),
    "halve": ("hS -> hS", lambda x: x / 2),
    "fold_in": ("k0 i0 -> k0", jax.random.fold_in),
    "next_key": ("k0 -> k0", lambda key: jax.random.split(key)[1]),
}

# These are told of the world as well: the dtypes, the named axis, the effects' log.
WORLDLY: dict[str, Operation] = {
    "spread": ("f0 -> fN", lambda world, x: jnp.full(world.width, x)),
    "to_float": ("iS -> fS", lambda world, i: world.cast(i, "f") / 7),
    "as_float": ("bS -> fS", lambda world, b: world.cast(b, "f")),
    "widen": ("hS -> fS", lambda world, x: world.cast(x, "f")),
    "narrow": ("fS -> hS", lambda world, x: world.cast(x, "h")),
    "uniform": ("k0 -> fN", lambda world, k: world.uniform(k)),
}

COLLECTIVE: dict[str, Operation] = {
    "psum": ("fS -> fS", lambda world, x: lax.psum(x, world.axis) / 2),
    "pmean": ("fS -> fS", lambda world, x: lax.pmean(x, world.axis)),
    "pmax": ("iS -> iS", lambda world, i: lax.pmax(i, world.axis)),
    "pmin": ("iS -> iS", lambda world, i: lax.pmin(i, world.axis)),
    "psum_int": ("iS -> iS", lambda world, i: lax.psum(i, world.axis) % 5),
    "gathered": ("fS -> fS", lambda world, x: lax.all_gather(x, world.axis)[0]),
    "ppermute": (
        "fS -> fS",
        lambda world, x: lax.ppermute(x, world.axis, [(0, 1), (1, 0)]),
    ),
    "axis_index": ("fS -> fS", lambda world, x: x * world.index()),
}


@jax.custom_batching.custom_vmap
def _mixed(i: Any) -> Any:
    return i


@_mixed.def_vmap
def _(axis_size: int, in_batched: Any, i: Any) -> tuple[Any, bool]:
    rest = jnp.sum(i, 0, dtype=i.dtype) + jnp.asarray(axis_size, i.dtype)
    return _mixed(i + rest), True


def _weight(world: Any, x: Any, i: Any) -> Any:
    return x * (1.5 + jnp.sin(world.cast(i, "f")))


def _noise(impl: str, world: Any, x: Any, i: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(3, impl=impl), i)
    return x * jax.random.uniform(key, x.shape, x.dtype)


def _raw_noise(world: Any, x: Any, i: Any) -> Any:
    key = jnp.stack([i.astype(jnp.uint32)] * 4)
    _, bits = lax.rng_bit_generator(key, x.shape, jnp.uint32)
    # In a checked `shard_map`, JAX takes bits for the same on all devices, and hands
    # those of the first to the backward pass. It knows more of a sum with `i`.
    bits = bits + (i ^ i).astype(bits.dtype)
    return x * (world.cast(bits, "f") / 2.0**32)


# In these a row of a batch can see the others, and each is differentiable: what is seen
# are integers and booleans, which do not move where the inputs move a little.
SEEING: dict[str, Operation] = {
    **{
        f"sees_{op}": (
            "fS i0 -> fS",
            lambda world, x, i, op=op: _weight(world, x, el.unvmap(i, op)),
        )
        for op in ("max", "min")
    },
    "sees_any": (
        "fS b0 -> fS",
        lambda world, x, b: x * jnp.where(el.unvmap(b), 1.5, 0.5).astype(x.dtype),
    ),
    "sees_eqx": (
        "fS i0 -> fS",
        lambda world, x, i: _weight(world, x, eqxi.unvmap_max(i)),
    ),
    "sees_mixed": ("fS i0 -> fS", lambda world, x, i: _weight(world, x, _mixed(i))),
    "sees_rbg": ("fS i0 -> fS", functools.partial(_noise, "rbg")),
    "sees_unsafe": ("fS i0 -> fS", functools.partial(_noise, "unsafe_rbg")),
    "sees_raw": ("fS i0 -> fS", _raw_noise),
}


def _ordered(world: Any, x: Any) -> None:
    io_callback(world.log.append, None, x, ordered=True)


def _add_to_ref(world: Any, x: Any) -> None:
    world.ref[...] += x


EFFECTS: dict[str, Operation] = {
    "debug": ("f0 ->", lambda world, x: jax.debug.callback(world.unordered.append, x)),
    "ordered": ("f0 ->", _ordered),
    "ref": ("f0 ->", _add_to_ref),
}
