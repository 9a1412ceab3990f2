"""`IfElse`: the function whose condition holds."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, final

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import describe, is_dynamic
from .._calls import R, check_bool
from .._classes import AbstractBordered
from .._types import PyTree
from ._branches import run_one
from ._cond import as_condition
from ._switch import check_branches, named


@final
class IfElse(AbstractBordered, Generic[R]):
    """Runs the function whose condition holds: `if`, `elif`, ..., `else`.

    All functions are traced, and must return the same types, as for
    [`Cond`][eqloop.Cond]. Their arrays are arrays of this module.

    Args:
        branches: The functions.
        check_conditions: Whether the running program raises an error unless exactly one
            condition holds. Without the check, the first condition that holds decides,
            and the last branch is run if none holds.

    Raises:
        TypeError: If a branch is not callable, `branches` is not a sequence or
            `check_conditions` is not a bool. When called, if a condition is not a
            scalar boolean, if structures, shapes or dtypes differ, or if a jaxtyping
            annotation of a branch is violated.
        ValueError: If there is no branch. When called, if there are not as many
            conditions as branches, or if leaves that are not arrays differ.
        RuntimeError: When the program runs, compiled or not, if not exactly one
            condition holds; under `vmap`, if that is so for one of the examples.
            [`equinox.error_if`][] raises it, and `EQX_ON_ERROR` controls it.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> clip = el.IfElse([lambda x: -1.0, lambda x: x, lambda x: 1.0])
        >>> x = jnp.float32(3.0)
        >>> clip([x < -1, abs(x) <= 1, x > 1], x)
        Array(1., dtype=float32)

        With an `else`:

        >>> sign = el.IfElse(
        ...     [lambda: -1, lambda: 1, lambda: 0], check_conditions=False
        ... )
        >>> sign([x < 0, x > 0, True])
        Array(1, dtype=int32, weak_type=True)
    """

    _made_otherwise: ClassVar[str] = " The functions are given as one list."

    branches: Sequence[Callable[..., R]]
    check_conditions: bool = eqx.field(default=True, static=True, kw_only=True)

    def __check_init__(self) -> None:
        check_branches("IfElse", self.branches)
        check_bool("IfElse", "check_conditions", self.check_conditions)

    def __call__(
        self, conditions: PyTree, /, *operands: PyTree, **keywords: PyTree
    ) -> R:
        """Runs `branches[i](*operands)` for the `i` with `conditions[i]`.

        Args:
            conditions: One for each branch: booleans and scalar boolean arrays in a
                list or tuple, or one boolean array of them all.
            *operands: Any PyTrees.
            **keywords: Passed on as well.

        Returns:
            What the branch returns.
        """
        holds = _as_conditions(conditions, len(self.branches))
        # `argmax` finds the first that holds; the last one is for when no other does.
        index = jnp.argmax(holds.at[-1].set(True))
        if self.check_conditions:
            index = _check_exactly_one(index, holds)
        return run_one("IfElse", named(self.branches), index, operands, keywords)


def _as_conditions(conditions: PyTree, count: int) -> jax.Array:
    if isinstance(conditions, list | tuple):
        each = enumerate(conditions)
        arrays = [as_condition("IfElse", f"conditions[{i}]", c) for i, c in each]
        vector = jnp.array(arrays, bool)
    elif is_dynamic(conditions) and conditions.ndim == 1 and conditions.dtype == bool:
        vector = jnp.asarray(conditions)
    else:
        raise TypeError(
            f"IfElse: `conditions` must be a list or tuple of booleans, or one boolean "
            f"vector, with one for each branch, but it is {describe(conditions)}."
        )
    if vector.size != count:
        raise ValueError(
            f"IfElse: `conditions` must have one for each branch, {count}, but it has "
            f"{vector.size}. For an `else`, give True, and set "
            f"`check_conditions=False`."
        )
    return vector


def _check_exactly_one(index: jax.Array, holds: jax.Array) -> jax.Array:
    count = jnp.sum(holds)
    return eqx.branched_error_if(
        index,
        count != 1,
        (count > 1).astype(jnp.int32),
        [
            "IfElse: exactly one condition must hold, but none does. Pass one for what "
            "remains, or `check_conditions=False` to run the last branch then.",
            "IfElse: exactly one condition must hold, but several do. Pass conditions "
            "that exclude each other, or `check_conditions=False` for the first of "
            "those that hold.",
        ],
    )
