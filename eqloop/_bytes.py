"""Bytes as people write them."""

import re

from ._settings import int_of

_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGTP", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}
_UNIT_OF = {name.lower(): size for name, size in _UNITS.items()}


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
