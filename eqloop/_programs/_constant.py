"""Tables of integers in a program, as an equation without inputs.

If the expansion of a primitive closes over an array, JAX makes it an argument of the
program around it. JAX 0.10 loses count of such arguments within `shard_map`. So here
the numbers are parameters of a primitive.
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
    return constant_p.bind(numbers=tuple(array.ravel().tolist()), shape=array.shape)


def _array(numbers: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(numbers, np.int32).reshape(shape)


def _type(numbers: tuple[int, ...], shape: tuple[int, ...]) -> Aval:
    # Traced, since the type must name the mesh that is in use.
    return jax.make_jaxpr(lambda: jnp.zeros(shape, jnp.int32))().out_avals[0]


constant_p = jex.Primitive("constant")
constant_p.def_impl(lambda **params: jnp.asarray(_array(**params)))
constant_p.def_abstract_eval(_type)
mlir.register_lowering(
    constant_p, lambda context, **params: [mlir.ir_constant(_array(**params))]
)
