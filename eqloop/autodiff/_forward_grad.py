"""`ForwardGrad`: the gradient, estimated without a backward pass."""

from typing import final

import jax
import jax.numpy as jnp

from .._arrays import Arrays
from .._calls import setting
from .._types import PyTree
from ._call import Call
from ._complex import common_dtype
from ._counts import as_int
from ._directions import AbstractEstimate


@final
class ForwardGrad(AbstractEstimate):
    r"""An estimate of the gradient from derivatives in random directions.

    It is the mean of $(\nabla f \cdot v)\, v$ over directions $v$ of independent
    standard normal numbers. The estimate is unbiased and needs no backward pass, so it
    takes the memory of evaluating `f` with its tangents. For $n$ differentiated numbers
    and `tangents` directions, its variance is about $n/\text{tangents}$ times the
    square of the gradient.

    Args:
        f: The function. Its value is a scalar.
        tangents: How many directions, which are pushed forward at once.

    Returns:
        When called, as `f` is, and with a `key=` for the directions: the estimate, and
        value and aux as for [`Grad`][eqloop.Grad]. `f` does not get this
        key; if it needs one, give that parameter another name.

    Raises:
        TypeError: If a setting is not of its type; when called, as for `Grad`, and if
            `key` is not a key.
        ValueError: If `tangents` is less than 1, or `argnums` empty; when called, as
            for `Grad`.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> estimate = el.ForwardGrad(lambda x: jnp.sum(x**2), tangents=1000)
        >>> gradient = estimate(jnp.ones(2), key=jax.random.key(0))
        >>> bool(jnp.all(jnp.abs(gradient - 2.0) < 0.5))
        True

    References:
        Baydin, Pearlmutter, Syme, Wood & Torr, [Gradients without
        backpropagation](https://arxiv.org/abs/2202.08587), 2022.
    """

    tangents: int = setting(default=1, converter=as_int)

    def __call__(self, *args: PyTree, key: PyTree, **kwargs: PyTree) -> PyTree:
        """Estimates the gradient of `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`.
            key: A PRNG key, for the directions.
            **kwargs: The keyword arguments of `f`.

        Returns:
            The estimate, and with it what `return_value` and `has_aux` ask for.

        Raises:
            TypeError: If `key` is not a PRNG key, if an argument has no derivative, or
                if `f` does not return a real scalar.
            ValueError: If `argnums` names an argument that is not passed.
        """
        call, directions = self._directions(key, args, kwargs)
        return self._results(call, *_estimate(call, directions))


def _estimate(call: Call, directions: Arrays) -> tuple[PyTree, Arrays, Arrays]:
    push = jax.vmap(call.push, out_axes=(None, 0, None))
    outs, (slopes,), others = push(directions)

    # JAX defines the gradient of a complex array so that the real part of its product
    # with a direction is the derivative.
    def mean(v: PyTree) -> PyTree:
        dtype = common_dtype(slopes, v)
        total = jnp.tensordot(slopes.astype(dtype), jnp.conj(v).astype(dtype), axes=1)
        return total / len(slopes)

    leaves = [
        mean(v).astype(array.dtype)
        for v, array in zip(directions, call.arrays, strict=True)
    ]
    return call.gradient(leaves), outs, others
