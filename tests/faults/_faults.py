"""The faults that may be planted in a file, and a sample of them."""

import ast
import dataclasses
import itertools
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ._operators import Source, changes

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.toml")

# The primitive, the engine with the whiles, and the maps: of each a third of a sample.
PLACES = (
    (
        "eqloop/_programs/_formula.py",
        "eqloop/_programs/_vmapped.py",
        "eqloop/_programs/_calculus.py",
        "eqloop/_programs/_jaxprs.py",
        "eqloop/_programs/_doubled.py",
        "eqloop/_programs/_parted.py",
        "eqloop/_programs/_reaching.py",
        "eqloop/_arrays/_tangents.py",
    ),
    (
        "eqloop/checkpointing/engine",
        "eqloop/checkpointing/whiles",
        "eqloop/_programs/_small_equations.py",
    ),
    ("eqloop/mapping",),
)

# Texts, and how an object is shown.
_UNTOUCHED = ("__repr__", "__str__", "__doc__")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change to one place of a file.

    Attributes:
        file: The path of the file, from the root of the repository.
        function: The function that it is in.
        before: The lines that it changes, without their indentation.
        after: What they become.
        lines: The numbers of the lines of its statement, the first and the last.
        text: The whole file with the change.
    """

    file: str
    function: str
    before: str
    after: str
    lines: tuple[int, int] = dataclasses.field(compare=False)
    text: str = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        place = f"{self.file}:{self.lines[0]} {self.function}"
        return f"{place}\n  - {self.before}\n  + {self.after}"

    @property
    def is_of_a_class(self) -> bool:
        """Whether it is in the body of a class, outside of its methods."""
        *_, name = self.function.split(".")
        return name.lstrip("_")[0].isupper()

    @property
    def entry(self) -> str:
        """It as an entry of `explained.toml`, whose reason is to be filled in."""
        fields = ("file", "function", "before", "after")
        lines = [f"{name} = '''{getattr(self, name)}'''" for name in fields]
        return "\n".join(["[[fault]]", *lines, "reason = "])


def all_faults() -> list[list[Fault]]:
    """All faults, by place."""
    return [[f for path in group for f in _under(ROOT / path)] for group in PLACES]


def _under(path: Path) -> list[Fault]:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [fault for f in files for fault in faults(f, f.relative_to(ROOT).as_posix())]


def faults(path: Path, name: str) -> list[Fault]:
    """The faults of one file, each of them once."""
    source = Source(path.read_text())
    found = [
        _fault(source, name, function, lines, change)
        for function, lines, node in _nodes(source.tree, "", (1, 1))
        for change in changes(source, node)
    ]
    return list(dict.fromkeys(found))


def sample(groups: list[list[Fault]], count: int, seed: int) -> list[Fault]:
    """So many of the faults, the same ones each time, and as many of each group."""
    source = random.Random(seed)
    turns = itertools.zip_longest(*(source.sample(g, len(g)) for g in groups))
    return [fault for turn in turns for fault in turn if fault is not None][:count]


def explained() -> dict[Fault, str]:
    """Faults that no test is meant to find, each with the reason."""
    entries = tomllib.loads(EXPLAINED.read_text()).get("fault", [])
    return {
        Fault(
            **{k: v for k, v in entry.items() if k != "reason"}, lines=(0, 0), text=""
        ): entry["reason"]
        for entry in entries
    }


def _nodes(
    node: ast.AST, function: str, lines: tuple[int, int]
) -> Iterator[tuple[str, tuple[int, int], ast.AST]]:
    """What is run, with the function that it is in and the lines of its statement."""
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            function = f"{function}.{node.name}".lstrip(".")
            if node.name in _UNTOUCHED:
                return
            arguments = [node.args] if isinstance(node, ast.FunctionDef) else []
            children = [*arguments, *node.body]
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        # It only has what is wrong fail sooner.
        case ast.keyword(arg="strict"):
            return
        case ast.AnnAssign():
            children = [node.value] if node.value else []
        case ast.arguments():
            children = [*node.defaults, *filter(None, node.kw_defaults)]
        case _:
            children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.stmt):
        # Of a statement with others in it, all before the first of these.
        within = getattr(node, "body", None)
        last = within[0].lineno - 1 if within else node.end_lineno
        lines = node.lineno, max(last or 0, node.lineno)
    # What is outside of all functions are types, and settings of caches.
    if function:
        yield function, lines, node
    for child in children:
        yield from _nodes(child, function, lines)


def _fault(
    source: Source,
    name: str,
    function: str,
    lines: tuple[int, int],
    change: tuple[int, int, str],
) -> Fault:
    start, end, new = change
    text = source.text
    first = text.rfind(b"\n", 0, start) + 1
    last = end + (text[end:].find(b"\n") if b"\n" in text[end:] else len(text) - end)
    changed = text[first:start] + new.encode() + text[end:last]
    shown = lambda part: " ".join(part.decode().split())
    return Fault(
        name,
        function,
        shown(text[first:last]),
        shown(changed),
        lines,
        (text[:first] + changed + text[last:]).decode(),
    )
