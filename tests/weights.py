"""Weights and other numbers that no program draws.

JAX compiles a program for each shape that it draws, which takes longer than most tests.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

Module = TypeVar("Module")


def normal(
    seed: int, shape: tuple[int, ...], dtype: Any = float, scale: float = 1.0
) -> jax.Array:
    """What `jax.random.normal` is for, with numbers from NumPy."""
    generator = np.random.default_rng(seed)
    numbers = generator.normal(0.0, scale, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        numbers = (numbers + 1j * generator.normal(0.0, scale, shape)) / 2**0.5
    return jnp.asarray(numbers.astype(dtype))


def without_key(make: Callable[..., Module], *args: Any) -> Module:
    """The module that `make(*args, key=key)` is, with weights that nobody draws."""
    key = jax.eval_shape(jax.random.key, 0)
    leaves, tree = jax.tree.flatten(eqx.filter_eval_shape(make, *args, key=key))
    return tree.unflatten(_filled(i, leaf) for i, leaf in enumerate(leaves))


def _filled(seed: int, leaf: Any) -> Any:
    """An array in place of a shape: small enough to saturate no gate."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return normal(seed, leaf.shape, leaf.dtype, max(leaf.shape, default=1) ** -0.5)
