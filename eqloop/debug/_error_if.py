"""Errors and breakpoints that depend on values."""

from typing import TypeVar

import equinox as eqx
import jax
import numpy as np

from .._arrays import describe, flatten, is_dynamic
from .._tracebacks import border
from .._types import Value

_T = TypeVar("_T")


@border
def error_if(x: _T, pred: Value, msg: str) -> _T:
    """Raises an error if a condition holds, while a compiled program runs.

    Args:
        x: Any PyTree that has an array. Use the returned value from then on: the error
            is raised only if it is used.
        pred: Whether to raise: a boolean, or an array of booleans, of which one is
            enough.
        msg: What the error says.

    Returns:
        `x`, unchanged.

    Raises:
        TypeError: `pred` is not boolean, `msg` is not a string, or `x` has no array.
        RuntimeError: If `pred` holds. Under `jax.jit` rather than `eqloop.Jit` or
            `equinox.filter_jit`, JAX wraps it.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.Jit
        ... def root(x):
        ...     return jnp.sqrt(el.error_if(x, x < 0, "x must not be negative"))
        >>> root(jnp.float32(4.0))
        Array(2., dtype=float32)

    References:
        [`equinox.error_if`](https://docs.kidger.site/equinox/api/errors/).
    """
    if not isinstance(msg, str):
        raise TypeError(f"error_if: `msg` must be a string, not {describe(msg)}.")
    pred = _boolean("error_if", pred)
    if not any(map(is_dynamic, flatten(x)[0])):
        raise TypeError(
            "error_if: `x` has no array, so the error cannot be tied to a computation. "
            "Pass an array that is used later, and use the result in its place."
        )
    return eqx.error_if(x, pred, msg)


@border
def breakpoint_if(pred: Value) -> None:
    """Opens JAX's debugger if a condition holds, while a program runs.

    Args:
        pred: Whether to open it: a boolean, or an array of booleans, of which one is
            enough.

    Raises:
        TypeError: `pred` is not boolean.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.Jit
        ... def f(x):
        ...     y = jnp.log(x)
        ...     el.breakpoint_if(~jnp.isfinite(y))
        ...     return y
        >>> f(jnp.float32(1.0))
        Array(0., dtype=float32)

    References:
        [`equinox.debug.breakpoint_if`](https://docs.kidger.site/equinox/api/debug/).
    """
    eqx.debug.breakpoint_if(_boolean("breakpoint_if", pred))


def _boolean(owner: str, pred: Value) -> Value:
    is_array = isinstance(pred, np.bool_ | np.ndarray | jax.Array)
    if not (isinstance(pred, bool) or (is_array and pred.dtype == bool)):
        raise TypeError(
            f"{owner}: `pred` must be a boolean, or an array of them, not "
            f"{describe(pred)}."
        )
    return pred
