"""What tests assert: that trees are close or the same, and what an error says."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

_HALF = (jnp.float16, jnp.bfloat16)


def assert_close(
    actual: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Two trees are the same, static leaves too, and the numbers of arrays are close.

    Those of 16 bits are close within 5 %; pass that where others are made of these.
    """
    for a, e in _arrays(actual, expected):
        wide = _of_16_bits(e)
        if wide:
            a, e = (np.asarray(x).astype(np.float32) for x in (a, e))
        tolerance = max(rtol, 5e-2 * wide), max(atol, 5e-2 * wide)
        np.testing.assert_allclose(a, e, *tolerance)


def assert_same_types(actual: Any, expected: Any) -> None:
    """The arrays of two trees have the same types, weak and strong ones too."""
    for a, e in _arrays(actual, expected):
        assert getattr(a, "weak_type", False) == getattr(e, "weak_type", False)


def assert_same(actual: Any, expected: Any) -> None:
    """Two trees are the same: their leaves, the types of arrays, and all bits."""
    assert_same_types(actual, expected)
    for a, e in _arrays(actual, expected):
        np.testing.assert_array_equal(a, e)


def has_16_bits(tree: Any) -> bool:
    """Whether some array of a tree is of half precision."""
    return any(map(_of_16_bits, jax.tree.leaves(tree)))


def assert_raises(call: Callable[[], Any], said: str) -> None:
    """A call raises an error that names what it has to.

    `said` is as a traceback has it, `"TypeError: Scan: `f` … callable … 3"`. Its parts
    between ` … ` come one after the other, so that each is said of the one before: a
    path, what is there, what was expected, what to do instead. The words between them
    may change. The error may be of a subclass.
    """
    kind, _, named = said.partition(": ")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    assert kind in [one.__name__ for one in caught.type.__mro__], caught.value
    message, at = str(caught.value), 0
    for part in named.removeprefix("… ").split(" … "):
        found = message.find(part, at)
        assert found >= 0, f"{part!r} is not said, or not in its place:\n{message}"
        at = found + len(part)


def _arrays(actual: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """The arrays of two trees, of which all else is the same; of keys their bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        if isinstance(e, float):
            yield a, e
            continue
        if not isinstance(e, jax.Array | np.ndarray | np.generic):
            assert a == e
            continue
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        if e.dtype == jax.dtypes.float0:
            continue
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        yield a, e


def _of_16_bits(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) in _HALF
