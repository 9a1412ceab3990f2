"""Tables that are too long for a page: data, which the documentation filters."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "tables"


def data(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The data of a table, a line for each row; its cells may be Markdown."""
    lines = ",\n".join(json.dumps(list(row), ensure_ascii=False) for row in rows)
    head = json.dumps(list(columns), ensure_ascii=False)
    return f'{{"columns": {head},\n"rows": [\n{lines}\n]}}\n'
