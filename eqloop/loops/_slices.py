"""Which outputs a slice keeps: index arithmetic in plain Python, no JAX."""

import operator
from typing import Any


def kept_indices(length: int, kept: slice | None) -> tuple[range | None, bool]:
    """The indices that a slice keeps of a loop of so many steps.

    Args:
        length: The number of steps.
        kept: Any slice, or `None`.

    Returns:
        The indices in ascending order, or `None` if they are all; and whether the slice
        has them in descending order.

    >>> kept_indices(10, slice(None, None, 4)), kept_indices(10, slice(None, None, -4))
    ((range(0, 10, 4), False), (range(1, 13, 4), True))
    >>> kept_indices(10, slice(-99, 99))
    (None, False)
    """
    indices = range(length)[slice(None) if kept is None else kept]
    is_flipped = indices.step < 0
    if is_flipped:
        indices = indices[::-1]
    return None if len(indices) == length else indices, is_flipped


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
