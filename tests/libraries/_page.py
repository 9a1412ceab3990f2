"""The table of a page: a row for each library."""

from collections.abc import Iterable, Mapping

from ..benchmarks import _report
from ._cases import CASES
from ._judging import Found

_HEADER = ("library", "memory as it is", "with a budget", "share", "time")


def table(found: Mapping[str, Found]) -> str:
    """What was measured, as Markdown."""
    return _report.table(_HEADER, _rows(found))


def with_rows(text: str, found: Mapping[str, Found]) -> str:
    """A page whose table has these rows, besides others that it had.

    Raises:
        ValueError: If the page has no such table.
    """
    lines = text.splitlines()
    head = table({}).splitlines()
    if head[0] not in lines:
        raise ValueError(f"there is no table with the header `{head[0]}`")
    start = lines.index(head[0])
    end = next(i for i, x in enumerate([*lines, ""]) if i > start and not x)
    new = {row[0]: row for row in _rows(found)}
    for line in lines[start + 2 : end]:
        row = tuple(cell.strip() for cell in line.strip("|").split("|"))
        new.setdefault(row[0], row)
    order = [case.name for case in CASES]
    rows = sorted(new.values(), key=lambda row: order.index(row[0]))
    parts = [*lines[:start], _report.table(_HEADER, rows), *lines[end:]]
    return "\n".join(parts) + "\n"


def _rows(found: Mapping[str, Found]) -> Iterable[tuple[str, ...]]:
    return [_row(name, each) for name, each in found.items()]


def _row(name: str, found: Found) -> tuple[str, ...]:
    size = lambda nbytes: f"{nbytes / 1e6:.1f} MB"
    if found.plain is None:
        return name, "no gradient", size(found.taken), "", ""
    share, slower = f"{found.memory:.2f}", f"{found.slower:.2f}"
    return name, size(found.plain), size(found.taken), share, slower
