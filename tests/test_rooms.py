"""The house: which room may import what, and that a class has a name of its own."""

import ast
import functools
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import eqloop

from .code_lines import lines_of, lines_of_rooms

PACKAGE = Path(eqloop.__file__).parent
DOCS = PACKAGE.parent / "docs" / "contributing.md"

# The path of a module from the package on: `("loops", "_scan")`.
Module = tuple[str, ...]


class Import(NamedTuple):
    """What a module imports of the package.

    Attributes:
        line: Where.
        module: The module, or the room, that it is from.
    """

    line: int
    module: Module


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> Module:
    """The module in a file; a room, for its `__init__`."""
    *rooms, name = path.relative_to(PACKAGE).with_suffix("").parts
    return (*rooms, name) if name != "__init__" else tuple(rooms)


FILES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(module: Module) -> Iterator[Import]:
    """What of the package a module imports: at its top, in a function, or for types."""
    package = module if FILES[module].name == "__init__.py" else module[:-1]
    for node in ast.walk(parse(FILES[module])):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            source = (*above, *(node.module or "").split("."))
            source = tuple(filter(None, source))
            for alias in node.names:
                inner = (*source, alias.name)
                target = inner if inner in FILES else source
                yield Import(node.lineno, target)


def drawn_rooms() -> list[list[str]]:
    """The rows of rooms in the drawing of the docs, the topmost first."""
    (drawing,) = re.findall(r"```text\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return [line.split() for line in drawing.splitlines()]


ROWS = {room: i for i, row in enumerate(drawn_rooms()[::-1]) for room in row}


def room_of(module: Module) -> str | None:
    """The room of the drawing that a module is in; `None` at the top."""
    rooms = (".".join(module[:i]) for i in range(len(module), 0, -1))
    return next((room for room in rooms if room in ROWS), None)


def test_the_drawing_has_all_rooms():
    rooms = {module[0] for module in FILES if len(module) > 1}
    assert rooms == {room.partition(".")[0] for room in ROWS}


@pytest.mark.parametrize("module", [m for m in FILES if m], ids="/".join)
def test_a_module_imports_from_rooms_below_its_own(module: Module):
    room = room_of(module)
    for line, target in imports(module):
        other = room_of(target)
        if other is None or other == room:
            continue
        where = f"{FILES[module].relative_to(PACKAGE)}:{line}"
        assert room is not None, f"{where}: what is at the top needs {other}"
        assert ROWS[other] < ROWS[room], f"{where}: {other} is not below {room}"
        if other.partition(".")[0] != room.partition(".")[0]:
            assert len(target) == 1, f"{where}: {'.'.join(target)} is private to a room"


def test_modules_import_one_another_in_no_circle():
    graph = {
        module: {found.module for found in imports(module)}
        for module in FILES
        if module
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


# Attributes of JAX's and Python's objects that some classes here have as well.
FOREIGN = {"aval", "dtype", "func", "jaxpr", "mode", "name", "params", "shape"}


def own_attributes() -> set[str]:
    """The names of all methods and fields of the classes of the package."""
    classes = (
        node
        for path in FILES.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    )
    found = set()
    for node in (inner for one in classes for inner in one.body):
        match node:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return {name for name in found if not name.startswith("__")} - FOREIGN


def test_nobody_asks_our_own_classes_for_an_attribute_by_its_name():
    own, asked = own_attributes(), []
    for module, path in FILES.items():
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[_, ast.Constant(value=name), *_],
                ) if name in own:
                    asked.append((".".join(module), node.lineno, name))
    assert asked == []


def test_nobody_asks_which_kind_of_order_slots_or_reversal_it_is():
    rooms = {"orders", "slots", "reversals"}
    kinds = {
        node.name
        for module, path in FILES.items()
        if module[-2:-1] and module[-2] in rooms
        for node in parse(path).body
        if isinstance(node, ast.ClassDef)
        and any("Abstract" in ast.unparse(base) for base in node.bases)
    }
    assert {"Nested", "HostSlots", "Together"} <= kinds
    asked = []
    for module, path in FILES.items():
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]):
                    names = {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)}
                    if names & kinds:
                        asked.append((".".join(module), node.lineno))
    assert asked == []


def test_a_class_has_its_name_alone():
    """Functions may share a name: each is read with its module in mind."""
    found = defaultdict(set)
    for module, path in FILES.items():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(".".join(module))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


ROOMS = [m for m in FILES if m and FILES[m].name == "__init__.py"]


@pytest.mark.parametrize("room", ROOMS, ids="/".join)
def test_a_room_says_what_is_in_each_of_its_files(room: Module):
    folder = FILES[room].parent
    files = {path.name for path in folder.glob("_*.py")} - {"__init__.py"}
    docstring = ast.get_docstring(parse(FILES[room]))
    assert docstring is not None
    named = re.findall(r"`([a-z_]+\.py)`", docstring)
    assert sorted(set(named)) == sorted(files)


def test_the_engine_says_what_is_in_each_of_its_rooms():
    engine = FILES["checkpointing", "engine"]
    rooms = {f"{path.parent.name}/" for path in engine.parent.glob("*/__init__.py")}
    docstring = ast.get_docstring(parse(engine))
    assert docstring is not None
    assert set(re.findall(r"`([a-z_]+/)`", docstring)) == rooms


# The lines of code that each room may have, without docstrings, comments and blanks:
# 42,064 in all. A commit that saves some takes its line down. What takes one up names
# the feature that users see, and takes others down as far. The sum went up once, by
# 1,513 for kernels of recurrent cells, of rows with vectors, and for TPUs (`fused/`).
# `python -m tests.code_lines` prints the table.
MOST_LINES = {
    ".": 944,
    "_arrays": 1020,
    "_calls": 1089,
    "_compiled": 582,
    "_programs": 3520,
    "autodiff": 909,
    "branching": 352,
    "checkpointing": 2793,
    "checkpointing/engine": 5667,
    "checkpointing/fused": 5707,
    "checkpointing/planning": 1840,
    "checkpointing/rewrites": 1002,
    "checkpointing/steps": 1586,
    "checkpointing/whiles": 800,
    "debug": 670,
    "diffrax": 555,
    "fitting": 2822,
    "ir": 2230,
    "loops": 2380,
    "mapping": 1856,
    "oom": 447,
    "progress": 536,
    "rescheduling": 636,
    "resuming": 1749,
    "tracing": 372,
}


def test_no_room_has_more_lines_of_code_than_it_may():
    found = lines_of_rooms()
    more = {r: (n, MOST_LINES.get(r)) for r, n in found.items()}
    assert {r: of for r, of in more.items() if of[0] > (of[1] or 0)} == {}


def test_the_sum_of_these_lines_is_the_one_that_is_named():
    text = Path(__file__).read_text()
    (named,) = re.findall(r"^# ([\d,]+) in all\.", text, re.MULTILINE)
    assert int(named.replace(",", "")) == sum(MOST_LINES.values()) <= 42_064


def test_docstrings_comments_and_blanks_are_no_lines_of_code():
    text = '"""A module."""\n\n# Why.\nx = """a\nb"""\n\ndef f():\n    """It."""\n'
    assert lines_of(text) == 3


def test_files_that_are_named_exist():
    root = PACKAGE.parent
    folders = "eqloop", "tests", "docs", "examples", ".github"
    files = [path.as_posix() for f in folders for path in (root / f).rglob("*.py")]
    named = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.py)`")
    readers = [*FILES.values(), *root.glob("*.md"), *(root / "docs").rglob("*.md")]
    for reader in readers:
        for name in named.findall(reader.read_text()):
            assert any(file.endswith(f"/{name}") for file in files), (reader, name)


def test_docstrings_name_what_they_are_of():
    files = PACKAGE.rglob("*.py")
    nameless = re.compile(r'"""(?:The|As the|Like the) same\b')
    assert [path for path in files if nameless.search(path.read_text())] == []


def test_no_file_has_more_lines_than_one_reads_in_a_sitting():
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES.values()}
    assert {name: length for name, length in lengths.items() if length > 450} == {}
