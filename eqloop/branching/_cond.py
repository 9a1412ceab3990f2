"""`Cond`: one of two functions, as `jax.lax.cond` chooses."""

from collections.abc import Callable
from typing import Generic, final

import jax
import jax.numpy as jnp

from .._arrays import describe
from .._calls import R
from .._classes import AbstractBordered
from .._types import PyTree, Value
from ._branches import check_branch, run_one, scalar_of


@final
class Cond(AbstractBordered, Generic[R]):
    """Like `jax.lax.cond`: runs one of two functions, depending on a condition.

    Both functions are always traced. They must return the same structure, shapes and
    dtypes, and equal leaves where these are not arrays. A weak type is promoted to the
    other type, and numbers that differ become arrays. Under `vmap` over the condition,
    both functions are run, and the results are selected.

    The functions may be modules: their arrays are arrays of this module, and are
    differentiated. They may close over arrays, which are differentiated as well.

    Args:
        true_f: Called if the condition holds.
        false_f: Called if it does not.

    Raises:
        TypeError: If one of them is not callable. When called, if `pred` is not a
            scalar boolean, nor a real number, if structures, shapes or dtypes differ,
            or if a jaxtyping annotation of a branch is violated.
        ValueError: When called, if leaves that are not arrays differ.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> absolute = el.Cond(lambda x: x, lambda x: -x)
        >>> x = jnp.float32(-2.0)
        >>> absolute(x > 0, x)
        Array(2., dtype=float32)

        Leaves that are not arrays pass through unchanged:

        >>> keep = el.Cond(lambda tree: tree, lambda tree: {**tree, "x": 0.0})
        >>> keep(True, {"x": x, "name": "pole"})
        {'name': 'pole', 'x': Array(-2., dtype=float32)}

    References:
        [`jax.lax.cond`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.cond.html).
    """

    true_f: Callable[..., R]
    false_f: Callable[..., R]

    def __check_init__(self) -> None:
        check_branch("Cond", "true_f", self.true_f)
        check_branch("Cond", "false_f", self.false_f)

    def __call__(self, pred: Value, /, *operands: PyTree, **keywords: PyTree) -> R:
        """Runs `true_f(*operands)` if `pred`, and `false_f(*operands)` otherwise.

        Args:
            pred: A boolean, or a scalar boolean array. As in JAX, it may also be a
                number, an integer or a float, which holds unless it is zero.
            *operands: Any PyTrees.
            **keywords: Passed on as well.

        Returns:
            What the branch returns.
        """
        branches = [("false_f", self.false_f), ("true_f", self.true_f)]
        index = as_condition("Cond", "pred", _as_boolean(pred)).astype(jnp.int32)
        return run_one("Cond", branches, index, operands, keywords)


def _as_boolean(pred: Value) -> Value:
    """Whether a number is not zero; anything else as it is."""
    if (array := scalar_of(pred)) is None:
        return pred
    kinds = jnp.integer, jnp.floating
    is_real = any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    return array != 0 if is_real else pred


def as_condition(owner: str, name: str, condition: object) -> jax.Array:
    """Checks that a condition is a scalar boolean."""
    array = scalar_of(condition)
    if array is None or array.dtype != bool:
        raise TypeError(
            f"{owner}: `{name}` must be a scalar boolean, but it is "
            f"{describe(condition)}. Compare it (`x > 0`), reduce it (`jnp.any`), or "
            f"map over it (`jax.vmap`)."
        )
    return array
