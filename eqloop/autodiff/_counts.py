"""Settings of derivatives that are counts, mostly of directions."""

from typing import Any, SupportsIndex

from .._arrays import describe
from .._calls import as_int_if_index, check_least
from ..checkpointing import Budget, is_budget


def as_int(count: SupportsIndex | Budget | None) -> Any:
    """Makes an `int` of what can be used as one: the converter of such a setting."""
    return as_int_if_index(count)


def check_count(owner: str, name: str, what: str, count: object) -> None:
    """Raises unless a setting is an int, and at least 1."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(
            f"{owner}: `{name}` must be an int, {what}, but it is {describe(count)}."
        )
    check_least(owner, name, count, 1)


def check_chunk_size(owner: str, chunk_size: object) -> None:
    """Raises unless this is a number of directions to follow at once, or a budget."""
    if chunk_size is None or is_budget(chunk_size):
        return
    what = "how many directions to follow at once, or a `Budget`, or None for all"
    check_count(owner, "chunk_size", what, chunk_size)
