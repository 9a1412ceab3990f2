"""Every block of Python in the pages of the documentation runs.

A block of `>>>` examples is compared with its output. Any other is a program, or the
next part of the page's program: the blocks of a page share their names.
"""

import doctest
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page):
    namespace = {"__name__": page.stem}
    exec(compile(programs(page), page, "exec"), namespace)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    results = doctest.testfile(
        str(page), module_relative=False, globs=namespace, optionflags=flags
    )
    assert results.failed == 0
