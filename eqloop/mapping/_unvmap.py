"""`unvmap`: takes values out of every `vmap` around them, by reducing over it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import describe, is_dynamic, is_scalar, over_examples
from .._tracebacks import border
from .._types import PyTree, Value


@border
def unvmap(
    x: Value, op: Literal["any", "all", "max", "min", "none"] = "any"
) -> jax.Array:
    """Reduces an array to one value, including the axes of every `vmap` around it.

    The result is the same for all rows, and is not mapped. So a `jax.lax.cond` with it
    as the predicate runs only one branch under `vmap`. Without a `vmap` around it, it
    is `jnp.any(x)`, and so on. Its derivative is zero.

    In a map in chunks these are the rows of one chunk, the same ones in derivatives of
    the map. In a loop they are what is mapped around it: steps that use this are not
    reversed in batches of their own.

    Args:
        x: An array, or a number.
        op: Whether `"any"` element is true or `"all"` of them are, or the `"max"` or
            `"min"` of them. `"none"` does not reduce: it is for a value that is the
            same for all rows although JAX cannot know that, and returns the value of
            one row.

    Returns:
        An array without axes: a bool, or for `"max"` and `"min"` of the dtype of `x`;
        for `"none"` one like `x`.

    Raises:
        TypeError: If `x` is not an array.
        ValueError: If `op` is none of these, or `"max"` or `"min"` and there are no
            elements.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> @jax.vmap
        ... def clip(x):
        ...     is_large = el.unvmap(x > 1)  # one for all rows
        ...     return jax.lax.cond(is_large, lambda: jnp.minimum(x, 1), lambda: x)
        >>> clip(jnp.array([0.5, 2.0]))
        Array([0.5, 1. ], dtype=float32)
    """
    if op not in _OPERATIONS:
        known = ", ".join(map(repr, _OPERATIONS))
        raise ValueError(f"unvmap: `op` must be one of {known}, not {op!r}.")
    if not (is_dynamic(x) or is_scalar(x)):
        raise TypeError(f"unvmap: `x` must be an array, not {describe(x)}.")
    x = jnp.asarray(x)
    if not x.size and op in ("max", "min"):
        raise ValueError(
            f"unvmap: {op!r} needs at least one element, but `x` is {describe(x)}."
        )
    return _OPERATIONS[op](lax.stop_gradient(x))


@jax.custom_batching.custom_vmap
def _of_one_row(x: Value) -> Value:
    return x


@_of_one_row.def_vmap
def _(axis_size: int, in_batched: PyTree, x: Value) -> tuple[PyTree, bool]:
    return _of_one_row(x[0]), False


_OPERATIONS = {
    "any": over_examples(jnp.any),
    "all": over_examples(jnp.all),
    "max": over_examples(jnp.max),
    "min": over_examples(jnp.min),
    "none": _of_one_row,
}
