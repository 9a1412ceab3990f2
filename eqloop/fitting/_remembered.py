"""Ways to run parts as text, for a file that other processes read.

Only values of this library's own frozen classes, its functions by their names, numbers,
words and tuples of these are written, and nothing else is made of what is read.
"""

import dataclasses
import importlib
import json
from collections.abc import Sequence
from typing import Any

from ._options import Way

_PACKAGE = __name__.partition(".")[0]


class _NotWrittenError(Exception):
    """Raised at what cannot be written, or was not written here."""


def as_text(ways: Sequence[Way]) -> str | None:
    """The ways as text; `None` if something in them cannot be written."""
    try:
        return json.dumps([*map(_written, ways)])
    except _NotWrittenError:
        return None


def from_text(text: str) -> tuple[Way, ...] | None:
    """The ways that were written; `None` if it was not here."""
    try:
        ways = tuple(map(_read, json.loads(text)))
    # Whoever changes such a file by hand may have written anything.
    except (_NotWrittenError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return ways if all(isinstance(way, Way) for way in ways) else None


def _written(x: Any) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) is tuple:
        return [*map(_written, x)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: _written(getattr(x, f.name)) for f in dataclasses.fields(x)}
        return {"class": _name(type(x)), **fields}
    if callable(x):
        return {"name": _name(x)}
    raise _NotWrittenError


def _name(x: Any) -> str:
    name = f"{x.__module__}:{x.__qualname__}"
    if _named(name) is not x:
        raise _NotWrittenError
    return name


def _named(name: str) -> Any:
    module, _, own = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise _NotWrittenError
    return getattr(importlib.import_module(module), own)


def _read(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_read, x))
    if not isinstance(x, dict):
        return x
    if "name" in x:
        return _named(x["name"])
    kind = _named(x.pop("class"))
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise _NotWrittenError
    return kind(**{name: _read(value) for name, value in x.items()})
