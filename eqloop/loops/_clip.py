"""`ClipCotangent`: the norm of what goes back from step to step is limited."""

import dataclasses
import functools
import math
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import describe, is_complex
from .._calls import check_bool
from .._classes import SettingMeta
from .._types import PyTree, Value


@final
@dataclasses.dataclass(frozen=True)
class ClipCotangent(metaclass=SettingMeta):
    """Limits the norm of the cotangent of the carry in each step of the backward pass.

    The norm is that of all leaves of the cotangent together. So a gradient that
    explodes is limited at each step, and not only at the end.

    What is not finite stays visible, as in Optax and PyTorch. If an entry is infinite,
    so is the norm: infinite entries become NaN, and all others 0. If one is NaN, all
    become NaN.

    Args:
        max_norm: The largest Euclidean norm that a cotangent keeps. With `math.inf` it
            keeps any norm, which is of use with `log`.
        log: Whether to log the norm of each step, as it is before it is limited, for
            the `log` of the loop's call.

    Raises:
        TypeError: If `max_norm` is not a number, or `log` not a bool.
        ValueError: If `max_norm` is not positive.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> double = lambda c, _: (2 * c, None)
        >>> scan = el.Scan(double, backward=el.ClipCotangent(10.0))
        >>> jax.grad(lambda c: scan(c, length=100)[0])(1.0)
        Array(10., dtype=float32...)

        The norm at every step, the first step first:

        >>> scan = el.Scan(double, backward=el.ClipCotangent(4.0, log=True))
        >>> loss = lambda c, log: scan(c, length=5, log=log)[0]
        >>> jax.grad(loss, argnums=1)(1.0, scan.empty_log(1.0, length=5))
        Array([8., 8., 8., 4., 2.], dtype=float32)

    References:
        R. Pascanu, T. Mikolov and Y. Bengio, *On the difficulty of training recurrent
        neural networks*, [arXiv:1211.5063](https://arxiv.org/abs/1211.5063).
    """

    max_norm: float
    log: bool = False

    def __post_init__(self) -> None:
        norm = self.max_norm
        is_number = isinstance(norm, int | float | np.number)
        if not is_number or isinstance(norm, bool):
            raise TypeError(
                f"ClipCotangent: `max_norm` must be a number that is known when "
                f"tracing, not {describe(norm)}."
            )
        if not norm > 0:
            raise ValueError(
                f"ClipCotangent: `max_norm` must be more than 0, but it is {norm}."
            )
        check_bool("ClipCotangent", "log", self.log)
        object.__setattr__(self, "max_norm", float(norm))

    def __call__(self, cotangent: PyTree) -> PyTree:
        """Scales a cotangent.

        Args:
            cotangent: A tree of arrays.

        Returns:
            The same with at most this norm; with `log`, a pair of this, and of the norm
            that was given.
        """
        leaves = jax.tree.leaves(cotangent)
        parts = [(x.real, x.imag) if is_complex(x) else (x,) for x in leaves]
        numbers = [part.astype(float) for each in parts for part in each]
        # Squares of large entries overflow, and those of small ones vanish, in half
        # precision soon. So what is squared has been divided by about the largest one.
        # Which number that is makes no difference, and it has no derivative.
        largest = functools.reduce(
            jnp.maximum,
            (jnp.max(jnp.abs(x), initial=0) for x in numbers),
            jnp.zeros(()),
        )
        largest = lax.stop_gradient(largest)
        # XLA multiplies by the inverse, which for the largest numbers would be 0.
        small = jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)
        unit = jnp.where(largest > 1, largest / 8, small)
        unit = jnp.where(jnp.isfinite(largest), unit, 1)
        total = sum((jnp.sum(jnp.square(x / unit)) for x in numbers), jnp.zeros(()))
        # The root has no slope at zero, and neither have results that are not taken.
        is_zero = total == 0
        norm = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, total)))
        keeps_any = math.isinf(self.max_norm)
        is_large = ~(keeps_any | (norm <= self.max_norm / unit))
        scale = jnp.where(is_large, self.max_norm, 1) / jnp.where(is_large, norm, 1)

        def clipped(x: Value) -> Value:
            # In a precision that can hold the scale.
            wide = x if is_complex(x) else x.astype(float)
            of_unit = wide * (1 / unit).astype(wide.dtype)
            scaled = (of_unit * scale.astype(wide.dtype)).astype(x.dtype)
            # Left as it is to the last bit, if it is not too large.
            return jnp.where(is_large, scaled, x)

        result = jax.tree.map(clipped, cotangent)
        return (result, norm * unit) if self.log else result
