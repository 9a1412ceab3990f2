"""How an expression is broken over lines: as `ruff format` would do it."""

import dataclasses
from collections.abc import Iterable
from typing import TypeAlias

WIDTH = 88
INDENT = "    "


@dataclasses.dataclass(frozen=True)
class Brackets:
    """Items in brackets: a call, a tuple or a list.

    Attributes:
        opening: What stands before the items, bracket included: `"lax.scan("`.
        is_call: Whether it is the call of a function, whose arguments may share a line
            of their own; the items of a tuple or list then get a line each.
        bare: Whether the brackets are left out if all fits on one line.
    """

    opening: str
    items: tuple["Item", ...]
    closing: str
    is_call: bool = False
    bare: bool = False


@dataclasses.dataclass(frozen=True)
class Keyword:
    """`name=value` in a call."""

    name: str
    value: "str | Brackets"


Text: TypeAlias = str | Brackets
Item: TypeAlias = Text | Keyword


def call(function: str, *arguments: Item, **keywords: Text) -> Brackets:
    """`function(*arguments, **keywords)`."""
    named = [Keyword(name, value) for name, value in keywords.items()]
    return Brackets(f"{function}(", (*arguments, *named), ")", is_call=True)


def tuple_of(items: Iterable[Text], *, bare: bool = False) -> Brackets:
    """`(a, b)`, or `a, b` on one line if it is bare."""
    return Brackets("(", tuple(items), ")", bare=bare)


def list_of(items: Iterable[Text]) -> Brackets:
    """`[a, b]`."""
    return Brackets("[", tuple(items), "]")


def structure(items: Iterable[Text], *, bare: bool = False) -> Text:
    """One item as it is; several, or none, as a tuple."""
    items = list(items)
    return items[0] if len(items) == 1 else tuple_of(items, bare=bare)


def one_line(item: Item) -> str:
    """An item on one line, however long."""
    if isinstance(item, str):
        return item
    if isinstance(item, Keyword):
        return f"{item.name}={one_line(item.value)}"
    text = ", ".join(map(one_line, item.items))
    is_tuple = not item.is_call and item.opening == "("
    if is_tuple and len(item.items) == 1:
        text += ","
    return (
        text
        if item.bare and len(item.items) > 1
        else f"{item.opening}{text}{item.closing}"
    )


def lines(
    item: Item, *, indent: int = 0, prefix: str = "", suffix: str = ""
) -> list[str]:
    """An item, between a prefix and a suffix, on as few lines as it fits on."""
    margin = INDENT * indent
    flat = f"{margin}{prefix}{one_line(item)}{suffix}"
    if isinstance(item, Keyword):
        prefix, item = f"{prefix}{item.name}=", item.value
    if len(flat) <= WIDTH or isinstance(item, str) or not item.items:
        return [flat]
    opening = f"{margin}{prefix}{item.opening}"
    closing = f"{margin}{item.closing}{suffix}"
    body = f"{margin}{INDENT}{', '.join(map(one_line, item.items))}"
    if item.is_call and len(body) <= WIDTH:
        return [opening, body, closing]
    inside = [
        line
        for entry in item.items
        for line in lines(entry, indent=indent + 1, suffix=",")
    ]
    return [opening, *inside, closing]
