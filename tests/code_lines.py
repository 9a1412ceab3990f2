"""Lines of code, without docstrings, comments and blanks: `python -m tests.code_lines`.

What it prints are the lines of each room, as `test_rooms.py` has them, and their sum.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "eqloop"

# Tokens that are no code.
_OTHERS = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def lines_of(text: str) -> int:
    """The lines of code of a module."""
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    first = node.body[0]
                    docstrings |= {*range(first.lineno, (first.end_lineno or 0) + 1)}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _OTHERS:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def room_of(path: Path) -> str:
    """The room of a module: a folder, and within `checkpointing` one of its folders."""
    *folders, _ = path.relative_to(PACKAGE).parts
    return "/".join(folders[: 2 if folders[:1] == ["checkpointing"] else 1]) or "."


def lines_of_rooms() -> Counter[str]:
    """The lines of code of each room."""
    found = Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        found[room_of(path)] += lines_of(path.read_text())
    return found


if __name__ == "__main__":
    rooms = lines_of_rooms()
    for room, lines in sorted(rooms.items()):
        print(f'    "{room}": {lines},')
    print(f"in all: {sum(rooms.values())}")
