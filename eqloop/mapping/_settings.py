"""What the settings of maps may be."""

import operator
from typing import Any

from .._partition import describe


def as_count(owner: str, name: str, what: str, value: Any, least: int = 1) -> int:
    """Checks a setting that is a number of rows.

    Args:
        owner: The name of the transform.
        name: The name of the setting.
        what: What it is the number of.
        value: What was given.
        least: The least that will do.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"{owner}: `{name}` must be an int, {what}, but it is {describe(value)}, "
            f"of type {type(value).__name__}."
        ) from error
    if number < least:
        raise ValueError(
            f"{owner}: `{name}` must be at least {least}, but it is {number}."
        )
    return number


def check_flag(owner: str, name: str, value: Any) -> None:
    """Checks a setting that is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be a bool, not {value!r}.")
