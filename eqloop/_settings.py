"""What settings may be, and how those that are inherited are documented."""

import dataclasses
import inspect
import operator
import re

from ._partition import describe
from ._types import Value

_ARGS = re.compile(r"^Args:\n(?: {4}.*\n|\n(?= {4}))+", re.MULTILINE)
_SECTION = re.compile(r"(?=^\w+:$)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?:^ {8}.*\n)*", re.MULTILINE)


def document_settings(cls: type) -> None:
    """Completes the `Args:` of a class by those of the classes it is derived from.

    So a setting that several classes have is documented once, where it is declared; a
    class for which it means something else says so in its own docstring, which counts.
    """
    own = _documented(cls)
    entries: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        entries |= _documented(base)
    if not dataclasses.is_dataclass(cls) or own.keys() == entries.keys():
        return
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)
    args = "".join(entries[field.name] for field in fields if field.name in entries)
    doc = inspect.cleandoc(cls.__doc__ or "")
    if found := _ARGS.search(doc):
        cls.__doc__ = f"{doc[: found.start()]}Args:\n{args}{doc[found.end() :]}"
    elif found := _SECTION.search(doc):
        cls.__doc__ = f"{doc[: found.start()]}Args:\n{args}\n{doc[found.end() :]}"


def _documented(cls: type) -> dict[str, str]:
    """The entries of the `Args:` of a class, by what they are about."""
    args = _ARGS.search(inspect.cleandoc(vars(cls).get("__doc__") or "") + "\n")
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(args[0])} if args else {}


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
