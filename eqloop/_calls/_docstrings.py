"""Docstrings of classes that inherit settings from others."""

import dataclasses
import inspect
import re

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
