"""Passes numbers of 64 bits to callbacks, and back, as words of 32 bits.

JAX may run a callback in a thread of its own. `jax.enable_x64` as a context manager is
in effect only in the thread that entered it. In the thread of the callback, JAX would
round numbers of 64 bits to 32 bits, but it leaves words of 32 bits as they are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._types import Value

_WORD = np.dtype(np.uint32)


def to_words(leaf: Value) -> Value:
    """The words of each number, along a new last axis, if it has 64 bits or more."""
    dtype = jax.typeof(leaf).dtype
    if not _is_long(dtype):
        return leaf
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # JAX cannot take the bits of complex numbers, but those of their parts.
        parts = jnp.stack([lax.real(leaf), lax.imag(leaf)], axis=-1)
        words = lax.bitcast_convert_type(parts, _WORD)
        return words.reshape(*parts.shape[:-1], 4)
    return lax.bitcast_convert_type(leaf, _WORD)


def of_words(words: Value, dtype: np.dtype) -> Value:
    """The numbers of a dtype, given their words."""
    if not _is_long(dtype):
        return words
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(words, dtype)
    parts = words.reshape(*words.shape[:-1], 2, 2)
    parts = lax.bitcast_convert_type(parts, np.dtype(np.float64))
    return lax.complex(parts[..., 0], parts[..., 1])


def read_words(words: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same for a NumPy array, on the host."""
    if not _is_long(dtype):
        return words
    # The words of a number are the last axis, of which `view` leaves one entry.
    return np.ascontiguousarray(words).view(dtype)[..., 0]


def _is_long(dtype: np.dtype) -> bool:
    # A `complex64` has 64 bits, but its parts are floats of 32 bits.
    return dtype.itemsize >= 8 and dtype != np.complex64
