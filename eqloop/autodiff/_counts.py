"""Settings of derivatives that are counts, mostly of directions."""

from typing import Any, SupportsIndex

from .._calls import as_count, as_int_if_index
from ..checkpointing import Budget, is_budget


def as_int(count: SupportsIndex | Budget | None) -> Any:
    """Makes an `int` of what can be used as one: the converter of such a setting."""
    return as_int_if_index(count)


def check_chunk_size(owner: str, chunk_size: object) -> None:
    """Raises unless this is a number of directions to follow at once, or a budget."""
    if chunk_size is None or is_budget(chunk_size):
        return
    what = "how many directions to follow at once, or a `Budget`, or None for all"
    as_count(owner, "chunk_size", what, chunk_size)
