"""Every block of Python in the pages of the documentation runs.

A block of `>>>` examples is compared with its output. Any other is a program, or the
next part of the page's program: the blocks of a page share their names.
"""

import doctest
import operator
import re
from pathlib import Path
from types import ModuleType

import pytest

import eqloop as el

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "api").glob("*.md"))
PAGES = sorted(set(DOCS.rglob("*.md")) - set(REFERENCE))
_BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def programs(page: Path) -> str:
    """The blocks that are no examples, each where it stands, so that errors do too."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in _BLOCK.finditer(text):
        indent, code = block.groups()
        if ">>>" in code:
            continue
        first = text.count("\n", 0, block.start(2))
        for number, line in enumerate(code.splitlines(), first):
            lines[number] = line.removeprefix(indent)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_page(page):
    namespace = {"__name__": page.stem}
    exec(compile(programs(page), page, "exec"), namespace)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(
        str(page), module_relative=False, globs=namespace, optionflags=flags
    )
    assert results.failed == 0


def test_every_page_is_in_the_navigation():
    _, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    listed = re.findall(r"[\w/]+\.md", navigation)
    there = [str(page.relative_to(DOCS)) for page in PAGES + REFERENCE]
    assert sorted(listed) == sorted(there)


def test_everything_public_is_in_the_reference_once():
    text = "\n".join(page.read_text() for page in REFERENCE)
    names = re.findall(r"^::: eqloop\.([\w.]+)$", text, re.MULTILINE)
    documented = [id(operator.attrgetter(name)(el)) for name in names]
    assert len(documented) == len(set(documented))
    for value in public(el):
        of_module = isinstance(value, ModuleType) and id(value) not in documented
        for each in public(value) if of_module else [value]:
            assert id(each) in documented, each


def public(module):
    names = [name for name in module.__all__ if not name.startswith("__")]
    return [getattr(module, name) for name in names]
