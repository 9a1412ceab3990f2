"""Which outputs a slice keeps: index arithmetic in plain Python, no JAX."""

import operator
from typing import Any


def kept_indices(length: int, kept: slice | None) -> range | None:
    """The indices that a slice keeps of a loop of so many steps.

    Args:
        length: The number of steps.
        kept: Any slice, or `None`.

    Returns:
        The indices, or `None` if they are all in their order.

    >>> kept_indices(10, slice(None, None, 4)), kept_indices(10, slice(-2, 99))
    (range(0, 10, 4), range(8, 10))
    >>> kept_indices(10, slice(-99, 99)) is None
    True
    """
    if kept is None:
        return None
    indices = range(length)[kept]
    return None if indices == range(length) else indices


def as_index(owner: str, name: str, value: Any) -> int | None:
    """One of the three numbers of a slice.

    Raises:
        TypeError: If it is neither an int nor `None`.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{owner}: `{name}` must be an int that is known when tracing, or None, "
            f"not {value!r} of type {type(value).__name__}."
        ) from None
