"""What settings may be: checks, counts, and amounts of memory as people write them."""

import operator
import re

from .._arrays import describe
from .._types import Value

_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGTP", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}
_UNIT_OF = {name.lower(): size for name, size in _UNITS.items()}


def check_bool(owner: str, setting: str, value: object) -> None:
    """Raises unless a setting is `True` or `False`."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{setting}` must be a bool, not {value!r}.")


def int_of(value: Value) -> int | None:
    """The int that a value is or stands for; `None` for bools, tracers and the rest."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tracer has an `__index__`, too, which raises
        return None


def as_int_if_index(value: Value) -> Value:
    """The int that a value stands for, NumPy's say; any other value as it is."""
    number = int_of(value)
    return value if number is None else number


def check_least(owner: str, setting: str, value: int, least: int) -> None:
    """Raises if a setting is less than it may be."""
    if value < least:
        raise ValueError(
            f"{owner}: `{setting}` must be at least {least}, but it is {value}."
        )


def as_count(owner: str, setting: str, what: str, value: object, least: int = 1) -> int:
    """Makes an `int` of a setting that is a number of something.

    Args:
        owner: The name of the transform.
        setting: The name of the setting.
        what: What it is the number of.
        value: What was given.
        least: The least that will do.
    """
    if (number := int_of(value)) is None:
        raise TypeError(
            f"{owner}: `{setting}` must be an int, {what}, but it is "
            f"{describe(value)}, of type {type(value).__name__}."
        )
    check_least(owner, setting, number, least)
    return number


def parse_bytes(owner: str, value: object) -> int:
    """The number of bytes that an int or a string such as `"512MiB"` stands for.

    Raises:
        TypeError: If it is neither.
        ValueError: If the string cannot be read, or the number is not positive.
    """
    count = _count_of(owner, value)
    if count < 1:
        raise ValueError(f"{owner}: there must be at least 1 byte, not {value!r}.")
    return count


def _count_of(owner: str, value: object) -> int:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+)\s*", value, re.I)
        if match is None or match[2].lower() not in _UNIT_OF:
            raise ValueError(
                f"{owner}: {value!r} is not an amount of memory. Write a number and "
                f"its unit, such as '64kB', '512 MiB' or '1.5GiB', or give an int, "
                f"which is taken as bytes. Units are {', '.join(_UNITS)}."
            )
        return int(float(match[1]) * _UNIT_OF[match[2].lower()])
    if (count := int_of(value)) is None:
        raise TypeError(
            f"{owner}: the memory must be an int, in bytes, or a string such as "
            f"'512MiB', not {value!r} of type {type(value).__name__}."
        )
    return count


def format_bytes(count: int) -> str:
    """A count of bytes with three digits and a binary unit."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"
