"""`Switch`: one of several functions, as `jax.lax.switch` chooses."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, final

import jax
import jax.numpy as jnp

from .._arrays import describe
from .._calls import R
from .._classes import AbstractBordered
from .._types import PyTree, Value
from ._branches import Branches, check_branch, run_one, scalar_of


@final
class Switch(AbstractBordered, Generic[R]):
    """Like `jax.lax.switch`: runs one of several functions, depending on an index.

    All functions are traced, and must return the same types, as for
    [`Cond`][eqloop.Cond]. Their arrays are arrays of this module.

    Args:
        branches: The functions.

    Raises:
        TypeError: If one of them is not callable, or `branches` is not a sequence. When
            called, if `index` is not a scalar integer, if structures, shapes or dtypes
            differ, or if a jaxtyping annotation of a branch is violated.
        ValueError: If there is no branch. When called, if leaves that are not arrays
            differ.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> switch = el.Switch([jnp.sin, jnp.cos, lambda x: x])
        >>> switch(1, jnp.zeros(()))
        Array(1., dtype=float32)

        An index out of range is clamped, to the first or to the last branch:

        >>> switch(7, jnp.ones(2))
        Array([1., 1.], dtype=float32)

    References:
        [`jax.lax.switch`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.switch.html).
    """

    _made_otherwise: ClassVar[str] = " The functions are given as one list."

    branches: Sequence[Callable[..., R]]

    def __check_init__(self) -> None:
        check_branches("Switch", self.branches)

    def __call__(self, index: Value, /, *operands: PyTree, **keywords: PyTree) -> R:
        """Runs `branches[index](*operands)`.

        Args:
            index: An integer, or a scalar integer array. If it is negative the first
                branch is run, and if it is too large the last.
            *operands: Any PyTrees.
            **keywords: Passed on as well.

        Returns:
            What the branch returns.
        """
        index = _as_index(index)
        return run_one("Switch", named(self.branches), index, operands, keywords)


def check_branches(owner: str, branches: object) -> None:
    """Checks that `branches` is a sequence of at least one callable."""
    if not isinstance(branches, list | tuple):
        raise TypeError(
            f"{owner}: `branches` must be a list or tuple of functions, but it is "
            f"{describe(branches)}, of type {type(branches).__name__}."
        )
    if not branches:
        raise ValueError(f"{owner}: `branches` is empty, but there must be one to run.")
    for name, branch in named(branches):
        check_branch(owner, name, branch)


def named(branches: Sequence[Callable[..., PyTree]]) -> Branches:
    """Branches with the names that errors use for them."""
    return [(f"branches[{i}]", branch) for i, branch in enumerate(branches)]


def _as_index(index: Value) -> jax.Array:
    array = scalar_of(index)
    if array is None or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"Switch: `index` must be a scalar integer, but it is {describe(index)}. "
            f"To choose by a boolean, use `el.Cond`."
        )
    return array
