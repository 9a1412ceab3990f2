"""Where the library raises, and what it says there, read from its source."""

import ast
import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import eqloop

_PACKAGE = Path(eqloop.__file__).parent

# No user sees these: they are caught, belong to an abstract method, or hand on an error
# that was raised before.
_INTERNAL = {
    "AssertionError",
    "NoWayBackError.of",
    "NotCompiledError",
    "NotPanelsError",
    "NoSuchDevicesError",
    "UnprintableError",
    "_NoRuleError",
    "found.with_traceback",
}

# What raises for the library, the checks of annotations and those at run time.
_RAISING = {
    "checked()": "TypeCheckError",
    "eqx.branched_error_if": "EquinoxRuntimeError",
    "eqx.error_if": "EquinoxRuntimeError",
}
_KINDS = {
    "NoWayBackError": "ValueError",  # one of these
    "watch.error": "NonFiniteError",
    **_RAISING,
}


class Blank(NamedTuple):
    """A part of a message that is computed.

    Attributes:
        code: The expression that computes it.
    """

    code: str


Template = tuple[str | Blank, ...]


@dataclasses.dataclass(frozen=True)
class Site:
    """A message of an error, as the statement that raises it has it.

    It is told from others by its function and its number among the messages of the
    function, and by its file where several files have such a function: lines change
    too often.
    """

    file: str
    function: str
    number: int
    kind: str
    template: Template

    @property
    def name(self) -> str:
        """The function and the number."""
        return f"{self.function} {self.number}" if self.number > 1 else self.function

    @property
    def blanks(self) -> list[Blank]:
        """What is computed, each once, in the order of the message."""
        return list(dict.fromkeys(p for p in self.template if isinstance(p, Blank)))

    def fill(self, values: Sequence[str]) -> str:
        """The message with values in its blanks."""
        given = dict(zip(self.blanks, values, strict=True))
        return "".join(given[p] if isinstance(p, Blank) else p for p in self.template)


@functools.cache
def sites() -> dict[str, Site]:
    """All of them by what tells them apart, in the order of files and lines."""
    found = [site for path in _files() for site in _of(path)]
    names = Counter(site.name for site in found)
    is_one = lambda site: names[site.name] == 1
    return {s.name if is_one(s) else f"{s.file} {s.name}": s for s in found}


@functools.cache
def wording() -> str:
    """All text that is in the source, with a gap wherever something is filled in."""
    trees = [ast.parse(path.read_text()) for path in _files()]
    return "\n".join(
        "".join(part if isinstance(part, str) else "\0" for part in _parts(node))
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )


def _files() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _of(path: Path) -> Iterator[Site]:
    file = path.relative_to(_PACKAGE).as_posix()
    module = ast.parse(path.read_text())
    written = {node.name: node for node in module.body if _is_function(node)}
    seen: Counter[str] = Counter()
    for function, call in _calls(module, ""):
        kind = ast.unparse(call.func)
        for message in _messages(call):
            seen[function] += 1
            yield Site(
                file,
                function,
                seen[function],
                _KINDS.get(kind, kind),
                tuple(_parts(_written_out(message, written))),
            )


def _calls(node: ast.AST, within: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{child.name}".lstrip(".")
        match child:
            case ast.Raise(exc=ast.Call(func=func) as error):
                if ast.unparse(func) not in _INTERNAL:
                    yield within, error
            case ast.Call(func=func) if ast.unparse(func) in _RAISING:
                yield within, child
                continue
        yield from _calls(child, name)


def _messages(call: ast.Call) -> list[ast.expr]:
    *_, message = call.args
    return message.elts if isinstance(message, ast.List) else [message]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def _written_out(message: ast.expr, written: dict[str, ast.FunctionDef]) -> ast.expr:
    """A message that a function of the same file writes: what that returns."""
    match message:
        case ast.Call(func=ast.Name(id=name)) if name in written:
            function = written[name]
            names = [arg.arg for arg in function.args.args]
            given = dict(zip(names, message.args, strict=False))
            *_, last = function.body
            assert isinstance(last, ast.Return), f"{name} ends in no return"
            return _Given(given).visit(copy.deepcopy(last.value or message))
    return message


class _Given(ast.NodeTransformer):
    """Puts what is given for the parameters of a function in the place of these."""

    def __init__(self, given: dict[str, ast.expr]) -> None:
        self.given = given

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        match node.value:
            case ast.Name(id=name) if isinstance(self.given.get(name), ast.Constant):
                return self.given[name]
        return node


def _parts(message: ast.expr) -> Iterator[str | Blank]:
    match message:
        case ast.JoinedStr(values=values):
            for value in values:
                yield from _parts(value)
        case ast.BinOp(left=left, right=right):
            yield from _parts(left)
            yield from _parts(right)
        case ast.Constant(value=value):
            yield str(value)
        case ast.FormattedValue(value=value, conversion=conversion):
            is_repr = conversion == ord("r")
            yield Blank(ast.unparse(value) + "!r" * is_repr)
        case _:
            yield Blank(ast.unparse(message))
