"""Values that wait for others, whether or not XLA heeds barriers.

What depends on nothing, XLA may compute first of all, and then it lies in memory until
it is read. Where XLA drops barriers, only what is computed from a value waits for it.
So a value that is to wait for a number is multiplied by a one that is computed from it:

    x' = x * not(number > 1 and number < -1)
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import dtypes, lax

from .._types import Value
from ._array_types import axes_of, explicit_sharding
from ._tangents import is_inexact


def number_of(values: Iterable[Value]) -> Value | None:
    """A number that is known once all of these arrays are; `None` if there are none."""
    number = None
    for x in values:
        if not is_inexact(jax.typeof(x)) or not x.size:
            continue
        # Of an array that is split over an explicit mesh no device can name an entry.
        is_split = explicit_sharding(x) is not None
        entry = jnp.sum(x) if is_split else lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
        entry = lax.convert_element_type(jnp.real(entry).reshape(()), jnp.float32)
        number = entry if number is None else number + entry
    return None if number is None else lax.stop_gradient(number)


def waiting(x: Value, number: Value | None) -> Value:
    """A value, unchanged, that XLA computes only after a number."""
    # A value that is the same on all devices has to stay so.
    if number is None or not axes_of(number) <= axes_of(x):
        return x
    if jax.typeof(x).dtype == dtypes.float0:
        return x
    if jnp.issubdtype(x.dtype, dtypes.prng_key):
        data = waiting(jax.random.key_data(x), number)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    is_so = ~((number > 1) & (number < -1))
    if x.dtype == bool:
        return x & is_so
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    parts = [part * lax.convert_element_type(is_so, part.dtype) for part in parts]
    return lax.complex(*parts) if len(parts) > 1 else parts[0]
