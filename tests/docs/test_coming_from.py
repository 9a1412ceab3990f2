"""The pages for those who come from elsewhere name all there is, and what there is."""

import operator
import re
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import pytest

import eqloop as el
from eqloop import ir

from .names import NAMES

PAGES = Path(__file__).parents[2] / "docs/coming_from"

ROOMS = {"el": el, "eqx": eqx, "ir": ir}


def rows(page: str) -> Iterator[tuple[str, str]]:
    """The first and the second column of all tables."""
    for line in (PAGES / f"{page}.md").read_text().splitlines():
        if line.startswith("| "):
            _, theirs, ours, _ = line.split("|")
            yield theirs, ours


def code(page: str) -> str:
    """All blocks of Python."""
    _, *blocks = (PAGES / f"{page}.md").read_text().split("```python")
    return "".join(block.split("```")[0] for block in blocks)


def test_every_page_has_its_names():
    assert {path.stem for path in PAGES.glob("*.md")} == set(NAMES)


@pytest.mark.parametrize("page", NAMES)
def test_no_name_is_missing(page):
    quoted = [text for theirs, _ in rows(page) for text in re.findall("`.*?`", theirs)]
    listed = {name for text in quoted for name in re.findall(r"[A-Za-z_][\w.]*", text)}
    assert set(NAMES[page].split()) <= listed


@pytest.mark.parametrize("page", NAMES)
def test_counterparts_exist_and_have_an_example(page):
    examples = code(page)
    for _, ours in rows(page):
        for room, name in re.findall(r"\b(el|eqx|ir)\.(\w+(?:\.\w+)*)", ours):
            operator.attrgetter(name)(ROOMS[room])
            assert re.search(rf"\b{room}\.{re.escape(name)}\b", examples), name
