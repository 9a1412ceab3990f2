"""The tests themselves: what two of them share is in a module that is not a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path: Path) -> Iterator[str]:
    """The last name of each module that a file imports from, or imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")[-1:]
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)


def test_no_test_is_imported():
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    found = [
        (path.relative_to(TESTS).as_posix(), name)
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if name in tests
    ]
    assert found == []
