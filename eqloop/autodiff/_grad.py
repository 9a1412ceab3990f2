"""`Grad` and `VectorGrad`: gradients, in reverse mode."""

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp

from .._arrays import Arrays, describe
from .._calls import NewP, P, check_bool, setting
from .._types import PyTree, Value
from ._call import Call, is_differentiable
from ._complex import check_reverse, check_some_value
from ._derivative import AbstractExactDerivative


def check_scalar(call: Call, value: Value) -> None:
    """Raises unless `f` returned one number that has a derivative."""
    if not is_differentiable(value) or value.shape != ():
        what = jax.tree.map(describe, value)
        raise TypeError(
            f"{call.owner}: f must return a floating-point scalar, but it returned "
            f"{what}. For the derivatives of each of several numbers use `JacRev`, for "
            f"the gradient of their sum `VectorGrad`; with `has_aux=True` f may return "
            f"a pair of a scalar and anything else."
        )


class AbstractGradient(AbstractExactDerivative[P]):
    """The gradient of the sum of what a function returns."""

    holomorphic: bool = setting(default=False)

    def _derive(self, call: Call) -> tuple[PyTree, Arrays, Arrays]:
        outs, pull, others = jax.vjp(call.run, call.arrays, has_aux=True)
        (cts,) = pull(list(map(jnp.ones_like, outs)))
        return call.gradient(cts), outs, others

    def _check(self, call: Call, value: object) -> None:
        check_reverse(call, value, holomorphic=self.holomorphic)

    def __check_init__(self) -> None:
        check_bool(type(self).__name__, "holomorphic", self.holomorphic)


@final
class Grad(AbstractGradient[P]):
    """The gradient of a function whose value is a scalar, like `jax.grad`.

    Args:
        f: The function. It may be a module, and its arguments any PyTrees.
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.
            Without it arguments may be complex, and the value must be real.

    Returns:
        When called: the gradient, a tree like the argument, with `None` for leaves that
        are not differentiated; or `(value, gradient)`, `(gradient, aux)`,
        `((value, aux), gradient)`.

    Raises:
        TypeError: If a setting is not of its type; when called, if there is nothing to
            differentiate in an argument, or `f` does not return a scalar.
        ValueError: If `argnums` is empty; when called, if there is no such argument, or
            one is named twice.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> el.Grad(jnp.sin)(0.0)
        Array(1., dtype=float32, weak_type=True)

        A model, with what else there is to know:

        >>> @el.Grad(return_value=True, has_aux=True)
        ... def loss(model, x, y):
        ...     prediction = model(x)
        ...     return jnp.sum((prediction - y) ** 2), prediction
        >>> model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
        >>> (value, prediction), gradient = loss(model, jnp.ones(2), jnp.zeros(1))
        >>> gradient.weight.shape, value.shape, prediction.shape
        ((1, 2), (), (1,))

        By an argument's name:

        >>> el.Grad(lambda x, *, rate: rate * x, argnums="rate")(3.0, rate=2.0)
        Array(3., dtype=float32, weak_type=True)

    References:
        [`jax.grad`](https://docs.jax.dev/en/latest/_autosummary/jax.grad.html).
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "Grad[NewP]": ...

    def _check(self, call: Call, value: object) -> None:
        check_scalar(call, value)
        super()._check(call, value)


@final
class VectorGrad(AbstractGradient[P]):
    """The gradient of the sum of all outputs of a function.

    For an elementwise function, where each number of the value depends on only one
    number of the argument, these are the derivatives of each number of the value.

    Args:
        f: The function. Its value may be any PyTree; the sum leaves out leaves that
            have no derivative.
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.

    Returns:
        When called: the gradient, and value and aux as for [`Grad`][eqloop.Grad].

    Raises:
        TypeError: If a setting is not of its type; when called, if there is nothing to
            differentiate in an argument or in the value.
        ValueError: As for `Grad`.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> el.VectorGrad(lambda x: x**2)(jnp.arange(3.0))
        Array([0., 2., 4.], dtype=float32)
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "VectorGrad[NewP]": ...

    def _check(self, call: Call, value: object) -> None:
        check_some_value(call, value)
        super()._check(call, value)
