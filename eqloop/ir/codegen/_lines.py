"""How an expression is written, and broken over lines: as `ruff format` would do it."""

import ast
from collections.abc import Iterable

WIDTH = 88
INDENT = "    "


def call(function: str, *arguments: str, **keywords: str) -> str:
    """`function(*arguments, **keywords)`."""
    named = (f"{name}={value}" for name, value in keywords.items())
    return f"{function}({', '.join((*arguments, *named))})"


def tuple_of(items: Iterable[str], *, bare: bool = False) -> str:
    """`(a, b)`, or `a, b` if it is bare."""
    text = ", ".join(items := list(items))
    if len(items) == 1:
        return f"({text},)"
    return text if bare and items else f"({text})"


def list_of(items: Iterable[str]) -> str:
    """`[a, b]`."""
    return f"[{', '.join(items)}]"


def structure(items: Iterable[str], *, bare: bool = False) -> str:
    """One item as it is; several, or none, as a tuple."""
    items = list(items)
    return items[0] if len(items) == 1 else tuple_of(items, bare=bare)


def lines(
    text: str, *, indent: int = 0, prefix: str = "", suffix: str = ""
) -> list[str]:
    """An expression, between a prefix and a suffix, on as few lines as it fits on."""
    margin = INDENT * indent
    flat = f"{margin}{prefix}{text}{suffix}"
    before, items, after = _in_brackets(text) if len(flat) > WIDTH else ("", [], "")
    if not items:
        return [flat]
    opening, closing = f"{margin}{prefix}{before}", f"{margin}{after}{suffix}"
    body = f"{margin}{INDENT}{', '.join(name + value for name, value in items)}"
    # The arguments of a call may share a line. The items of a tuple or list may not.
    if before not in ("(", "[") and len(body) <= WIDTH:
        return [opening, body, closing]
    inside = (
        line
        for name, value in items
        for line in lines(value, indent=indent + 1, prefix=name, suffix=",")
    )
    return [opening, *inside, closing]


def _in_brackets(text: str) -> tuple[str, list[tuple[str, str]], str]:
    """What stands before the items of a call, tuple or list, these, and what after."""
    node = ast.parse(text, mode="eval").body
    of = lambda node: ast.get_source_segment(text, node) or ""
    match node:
        case ast.Call():
            items = [("", of(value)) for value in node.args]
            items += [(f"{each.arg}=", of(each.value)) for each in node.keywords]
            return f"{of(node.func)}(", items, ")"
        case ast.Tuple():
            return "(", [("", of(value)) for value in node.elts], ")"
        case ast.List():
            return "[", [("", of(value)) for value in node.elts], "]"
        case _:
            return "", [], ""
