"""`Remat`: a function whose residuals are computed again rather than stored."""

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, SupportsIndex, final

import equinox as eqx
import jax

from .._calls import (
    AbstractTransform,
    NewP,
    NewR,
    P,
    R,
    check_bool,
    compiled_once,
    open_call,
)
from .._types import PyTree
from ._policies import Policy, as_jax_policy, as_policy_or_wrong


def _as_argnums(argnums: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    try:
        if isinstance(argnums, SupportsIndex):
            return (operator.index(argnums),)
        return tuple(operator.index(argnum) for argnum in argnums)
    except TypeError:
        raise TypeError(
            f"Remat: `static_argnums` must be an int or a tuple of ints, the positions "
            f"of arguments, but it is {argnums!r}."
        ) from None


@final
class Remat(AbstractTransform[Callable[P, R]], Generic[P, R]):
    """Runs a function, and recomputes its residuals when it is differentiated.

    The values that reverse mode needs from inside `f` are not stored while `f` runs.
    Instead, the backward pass runs `f` again, from its arguments. So only the arguments
    take memory until then, at the cost of one more evaluation. Outside of
    differentiation nothing changes, and the derivatives are the same in every mode.
    `Checkpoint` is the same object.

    Call it like `f`. Arguments and results are any PyTrees. Their arrays and those of
    `f` are differentiated; other leaves pass through unchanged.

    Args:
        f: The function.
        policy: Which of the values inside `f` are stored: one of `eqloop.policies`, a
            callable from `jax.checkpoint_policies`, or the name of one of these. `None`
            stores none of them.
        prevent_cse: Whether to keep the compiler from noticing that `f` runs twice, and
            merging the two runs. Inside the body of a loop it cannot notice, and
            `False` leaves it more freedom.
        static_argnums: The positions of arguments that are static as a whole. Their
            NumPy arrays reach `f` as NumPy arrays.

    Raises:
        TypeError: `policy` is not a policy, or `static_argnums` are not ints.
        ValueError: `policy` is not the name of a policy, or, when called,
            `static_argnums` has a position for which there is no argument.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> mlp = eqx.nn.MLP(2, "scalar", 64, depth=3, key=jax.random.key(0))
        >>> model = el.Remat(mlp, policy=el.policies.save_dots)
        >>> grads = eqx.filter_grad(lambda model, x: model(x))(model, jnp.ones(2))
        >>> grads.f.layers[0].weight.shape
        (64, 2)

        As a decorator:

        >>> @el.Remat(policy="dots_saveable")
        ... def f(x):
        ...     return jnp.sin(jnp.sin(x))
    """

    f: Callable[P, R]
    policy: Policy | Callable[..., PyTree] | None = eqx.field(
        default=None, converter=as_policy_or_wrong, kw_only=True
    )
    prevent_cse: bool = eqx.field(default=True, static=True, kw_only=True)
    static_argnums: tuple[int, ...] = eqx.field(
        default=(), static=True, converter=_as_argnums, kw_only=True
    )

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Remat[NewP, NewR]": ...

    def __check_init__(self) -> None:
        check_bool("Remat", "prevent_cse", self.prevent_cse)
        as_jax_policy("Remat", self.policy)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.f)

    @compiled_once
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
            ValueError: If `static_argnums` names an argument that is not passed.
        """
        static = self._static_positions(len(args))
        kind = "checkpoint / remat"
        call, arrays = open_call("Remat", self.f, args, kwargs, static, kind=kind)
        policy = as_jax_policy(
            "Remat", self.policy
        )  # `eqx.tree_at` may have put in a name
        run = jax.checkpoint(
            call.on_arrays, prevent_cse=self.prevent_cse, policy=policy
        )
        out = run(arrays)
        return call.kept.join(out)

    def _static_positions(self, count: int) -> set[int]:
        for argnum in self.static_argnums:
            if not -count <= argnum < count:
                raise ValueError(
                    f"Remat: `static_argnums` has {argnum}, but f was called with "
                    f"{count} positional arguments. Arguments given by keyword have no "
                    f"position."
                )
        return {argnum % count for argnum in self.static_argnums}


Checkpoint = Remat
