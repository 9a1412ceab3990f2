"""Random PyTrees for the loops: dtypes of all kinds, nested, empty, static leaves."""

import enum
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ..weights import normal

INEXACT = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64)
DTYPES = (*INEXACT, jnp.int32, jnp.bool_, "key")


class Colour(enum.Enum):
    RED = "red"


class Pair(eqx.Module):
    """A module with a leaf that is an array, one that is not, and a static field."""

    array: Any
    activation: Any = jnp.tanh
    name: str = eqx.field(default="pair", static=True)


def array(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    """An array of any dtype, keys included, with values of about one."""
    generator = np.random.default_rng(seed)
    if dtype == "key":
        words = generator.integers(2**32, size=(*shape, 2), dtype=np.uint32)
        return jax.random.wrap_key_data(words)
    if dtype == jnp.int32:
        return jnp.asarray(generator.integers(-3, 4, shape, np.int32))
    if dtype == jnp.bool_:
        return jnp.asarray(generator.random(shape) < 0.5)
    return normal(seed, shape, dtype)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """PyTrees of these leaves and static ones."""
    static = st.sampled_from([None, "relu", jnp.tanh, Colour.RED])
    return st.recursive(
        leaves | static,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
            st.builds(Pair, inner),
        ),
        max_leaves=4,
    )


def mean(tree: Any) -> jax.Array:
    """A number that depends on every numeric leaf of a tree."""
    parts = [
        jnp.mean(jnp.real(leaf).astype(jnp.float32))
        for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return sum(parts, jnp.zeros(()))


def advance(leaf: Any, by: jax.Array) -> Any:
    """What becomes of a leaf of the carry in one step."""
    if not eqx.is_array(leaf):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) * 3 + 1)
    if leaf.dtype == jnp.int32:
        return (leaf * 3 + 1) % 7
    if leaf.dtype == jnp.bool_:
        return ~leaf
    return jnp.sin(leaf + by.astype(leaf.dtype))
