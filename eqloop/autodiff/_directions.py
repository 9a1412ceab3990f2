"""Random directions in which to differentiate."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import Arrays, axes_of_keys, describe, is_complex, is_dynamic
from .._calls import as_count, parameters_of
from .._types import PyTree, Value
from ._call import Call
from ._complex import check_reverse
from ._derivative import AbstractDerivative
from ._grad import check_scalar


def normal_directions(key: jax.Array, arrays: Arrays, count: int) -> list[jax.Array]:
    """Independent standard normal numbers for each array, along a new leading axis."""
    # The real and the imaginary part of complex numbers are independent as well.
    keys = jax.random.split(key, (len(arrays), 2))
    return [
        _normal(key, (count, *array.shape), array)
        for key, array in zip(keys, arrays, strict=True)
    ]


def _normal(keys: jax.Array, shape: tuple[int, ...], array: jax.Array) -> jax.Array:
    real = jnp.finfo(array.dtype).dtype  # that of the parts, if it is complex
    normal = jax.random.normal(keys[0], shape, real)
    if is_complex(array):
        normal = jax.lax.complex(normal, jax.random.normal(keys[1], shape, real))
    return normal


def check_key(owner: str, key: Value) -> None:
    """Raises unless this is one PRNG key."""
    if not is_dynamic(key) or axes_of_keys(key) != 0:
        raise TypeError(
            f"{owner}: `key` must be a PRNG key, as `jax.random.key(0)` makes it, not "
            f"{describe(key)}."
        )


class AbstractEstimate(AbstractDerivative[...]):
    """A derivative from those in random directions, by a key that its call is given."""

    tangents: eqx.AbstractVar[int]

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = [p for p in parameters_of(self.f).values() if p.name != "key"]
        key = inspect.Parameter("key", inspect.Parameter.KEYWORD_ONLY)
        last = parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        at = len(parameters) - bool(last)
        return inspect.Signature([*parameters[:at], key, *parameters[at:]])

    def _directions(
        self, key: Value, args: tuple[PyTree, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, list[jax.Array]]:
        """Opens a call, and makes the directions for it."""
        check_key(type(self).__name__, key)
        call = self._open(args, kwargs)
        return call, normal_directions(key, call.arrays, self.tangents)

    def _check(self, call: Call, value: object) -> None:
        check_scalar(call, value)
        check_reverse(call, value, holomorphic=False)

    def __check_init__(self) -> None:
        what = "how many directions to differentiate in"
        as_count(type(self).__name__, "tangents", what, self.tangents)
