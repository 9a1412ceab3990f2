"""Where the library raises: every statement at which an error of its own begins."""

import ast
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import eqloop

_PACKAGE = Path(eqloop.__file__).parent

# No user sees these: they are caught, belong to an abstract method, or hand on an error
# that was raised before.
_INTERNAL = {
    "AssertionError",
    "UnprintableError",
    "_NoRuleError",
    "found.with_traceback",
}

# What raises for the library: the checks of annotations, and those at run time.
_RAISING = {"checked()", "eqx.branched_error_if", "eqx.error_if"}


@dataclasses.dataclass(frozen=True)
class Site:
    """A statement that raises.

    It is told from others by its file, its function, and its number among those of the
    function: lines change too often.
    """

    file: str
    function: str
    number: int
    lines: range
    words: tuple[str, ...]

    def __str__(self) -> str:
        number = f" {self.number}" if self.number > 1 else ""
        return f"{self.file} {self.function}{number}"

    def may_say(self, message: str) -> bool:
        """Whether the text that is in the statement is in a message, in its order."""
        pattern = ".*".join(re.escape(words) for words in self.words)
        return re.search(pattern, message, re.DOTALL) is not None


@functools.cache
def sites() -> tuple[Site, ...]:
    """All of them, in the order of files and lines."""
    return tuple(site for path in sorted(_PACKAGE.rglob("*.py")) for site in _of(path))


def find(path: str, line: int) -> Site | None:
    """The one at a line of a file."""
    if not Path(path).is_relative_to(_PACKAGE):
        return None
    file = Path(path).relative_to(_PACKAGE).as_posix()
    return next((s for s in sites() if s.file == file and line in s.lines), None)


def _of(path: Path) -> Iterator[Site]:
    file = path.relative_to(_PACKAGE).as_posix()
    seen: Counter[str] = Counter()
    for function, node, call in _calls(ast.parse(path.read_text()), ""):
        seen[function] += 1
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        yield Site(file, function, seen[function], lines, tuple(_words(call)))


def _calls(
    node: ast.AST, within: str
) -> Iterator[tuple[str, ast.stmt | ast.expr, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
        match child:
            case ast.Call() if ast.unparse(child.func) in _RAISING:
                yield within, child, child
            case ast.Raise(exc=ast.Call() as error) if not _is_internal(error):
                yield within, child, error
        yield from _calls(child, name)


def _is_internal(error: ast.Call) -> bool:
    return ast.unparse(error.func) in _INTERNAL


def _words(error: ast.Call) -> Iterator[str]:
    """The parts of a message that are the same whenever it is shown."""
    for argument in error.args:
        parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
        for part in parts:
            if isinstance(part, ast.Constant):
                yield str(part.value)
