"""Every block of Python in the pages of the documentation runs.

A block of `>>>` examples is compared with its output. Any other is a program, or the
next part of the page's program: the blocks of a page share their names. A page that
needs packages says so above its title, in a line such as `requires: diffrax`, and runs
with the slow tests. So do the pages that tell at length, in programs of their own, what
the docstrings and other pages have examples of; what they name is looked up each time.
"""

import doctest
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import eqloop as el

from ..marks import slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "api").glob("*.md"))
PAGES = sorted(set(DOCS.rglob("*.md")) - set(REFERENCE))
# The loop of the front page, for fewer steps. `test_figures.py` compiles all of it.
_LONG, _SHORT = "jnp.ones((32, 10_000, 8))", "jnp.ones((32, 30, 8))"
_REQUIRES = re.compile(r"\A---\nrequires: ([\w ]+)\n---\n")
_LENGTHY = (
    "index.md",  # the program of the README, and its plan
    "getting_started.md",
    "coming_from/*.md",
    "recipes/*.md",
    "guides/*.md",
    "faq.md",
    "asked_elsewhere.md",
    "how_*.md",
)
_BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def _case(page: Path) -> Any:
    name = page.relative_to(DOCS)
    is_slow = _REQUIRES.match(page.read_text()) or any(map(name.match, _LENGTHY))
    case = slow if is_slow else pytest.param
    return case(page, id=str(name))


@pytest.mark.parametrize("page", list(map(_case, PAGES)))
def test_page(page):
    if required := _REQUIRES.match(page.read_text()):
        for package in required[1].split():
            pytest.importorskip(package)
    names = {"__name__": page.stem}
    for line, code in blocks(page.read_text()):
        if ">>>" in code:
            assert failures(page, line, code, names) == 0
        else:  # with the numbers that its lines have on the page, for tracebacks
            program = "\n" * line + code.replace(_LONG, _SHORT)
            exec(compile(program, page, "exec"), names)


def test_what_pages_name_is_there():
    for page in PAGES:
        for line, code in blocks(page.read_text()):
            for name in re.findall(r"\bel\.((?!diffrax)\w+(?:\.\w+)*)", code):
                assert has(el, name), f"{page}:{line}: el.{name}"


def has(namespace: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(namespace)
    except AttributeError:
        return False
    return True


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Each block of Python, without its indentation, and the number of its line."""
    for block in _BLOCK.finditer(text):
        indent, code = block.groups()
        lines = [line.removeprefix(indent) for line in code.splitlines(keepends=True)]
        yield text.count("\n", 0, block.start(2)), "".join(lines)


def failures(page: Path, line: int, code: str, names: dict[str, Any]) -> int:
    """How many examples of a block print something else than the page says."""
    parser = doctest.DocTestParser()
    example = parser.get_doctest(code, names, f"{page.name}:{line}", str(page), line)
    example.globs = names  # the parser made a copy
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.DocTestRunner(optionflags=flags).run(example, clear_globs=False)[0]


def test_every_page_is_in_the_navigation():
    _, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    listed = re.findall(r"[\w/]+\.md", navigation)
    there = [str(page.relative_to(DOCS)) for page in PAGES + REFERENCE]
    assert sorted(listed) == sorted(there)


def test_everything_public_is_in_the_reference_once():
    text = "\n".join(page.read_text() for page in REFERENCE)
    names = re.findall(r"^::: eqloop\.([\w.]+)$", text, re.MULTILINE)
    # That is not imported with the library: `tests/diffrax` looks after it.
    names = [name for name in names if not name.startswith("diffrax.")]
    documented = [id(operator.attrgetter(name)(el)) for name in names]
    assert len(documented) == len(set(documented))
    for value in public(el):
        of_module = isinstance(value, ModuleType) and id(value) not in documented
        for each in public(value) if of_module else [value]:
            assert id(each) in documented, each


def public(module):
    names = [name for name in module.__all__ if not name.startswith("__")]
    return [getattr(module, name) for name in names]
