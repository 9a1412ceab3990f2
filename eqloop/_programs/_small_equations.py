"""Small equations of our own: tables, values without derivatives, and marks.

- **A table of integers** (`constant`). If the expansion of a primitive closes over an
  array, JAX makes it an argument of the program around it. JAX 0.10 loses count of such
  arguments within `shard_map`. So here the numbers are parameters of a primitive.
- **A value without its derivative** (`detached`), which can be transposed.
- **A mark** (`mark`) that tells a debugger, if one is watching, which step of a loop
  runs. The loops of this library run the user's steps in loops of their own. So before
  each step, or each block of steps, they mark which of the user's steps it is. A mark
  is an equation, but only in programs that are traced to be watched
  (`DebugNonFinite`).
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from .._arrays import is_inexact
from .._types import Aval, BatchAxis, PyTree, Value
from ._effects import is_ref
from ._formula import Formula


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


class Detached(Formula):
    """The identity without a derivative, as `jax.lax.stop_gradient`.

    Unlike that it can be transposed: it stands where a user's function is linear.
    """

    def __init__(self, aval: Aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"aval": aval}
        super().__init__()

    def expand(self, x: Value) -> Value:
        return x

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.zero_cts()

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return [False]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return list(marks)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        (x,), (dim,) = args, dims
        return Detached(jax.typeof(x)), args, [dim]


def detached(x: Value) -> Value:
    """A value without its derivative."""
    return Detached(jax.typeof(x)).apply(x) if is_inexact(x) else x


def without_derivatives(tree: PyTree) -> PyTree:
    """A tree whose arrays have no derivative; references stay as they are."""
    return jax.tree.map(lambda x: x if is_ref(x) else detached(x), tree)


# Whether the loops that are traced mark their steps, since somebody is watching.
is_watched: Any = jax.make_user_context(False)


def mark(index: object, count: int = 1) -> None:
    """Marks which steps are run next: so many, from the smallest index among them on.

    An index is the place of a step in the inputs of the loop.
    """
    if is_watched.value:
        position_p.bind(jnp.asarray(index, jnp.int32), count=count)


# For those who read the jaxpr; it compiles to nothing.
position_p = jex.Primitive("position")
position_p.multiple_results = True
position_p.def_abstract_eval(lambda index, count: [])


def _batch(args: PyTree, dims: PyTree, count: int) -> tuple[list[Value], list[Value]]:
    # If examples are at different steps, the furthest stands for all.
    position_p.bind(jnp.max(args[0]), count=count)
    return [], []


def _lower(ctx: Any, index: Value, count: int) -> list[Value]:
    return []


batching.primitive_batchers[position_p] = _batch
mlir.register_lowering(position_p, _lower)
