"""Integers that are part of a program rather than inputs of it.

An array that a primitive is expanded with becomes an argument of the program around it,
and JAX 0.10 loses count of such arguments within `shard_map`. So these are an equation
without inputs.
"""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from .._types import Aval, PyTree


def constant(numbers: PyTree) -> jax.Array:
    """An array of integers that are known beforehand."""
    array = np.asarray(numbers, np.int32)
    return _constant_p.bind(numbers=tuple(array.ravel().tolist()), shape=array.shape)


def _array(numbers: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(numbers, np.int32).reshape(shape)


def _type(numbers: tuple[int, ...], shape: tuple[int, ...]) -> Aval:
    # Traced, since the type must name the mesh that is in use.
    return jax.make_jaxpr(lambda: jnp.zeros(shape, jnp.int32))().out_avals[0]


_constant_p = jex.Primitive("constant")
_constant_p.def_impl(lambda **params: jnp.asarray(_array(**params)))
_constant_p.def_abstract_eval(_type)
mlir.register_lowering(
    _constant_p, lambda context, **params: [mlir.ir_constant(_array(**params))]
)
