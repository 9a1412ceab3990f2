"""The text of pictures can be read on a phone, where a page is 358 pixels wide.

A picture is shown as wide as the page, or as wide as its `--least` says, if that is
more.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
WIDTH, LEAST = 358, 9
SHOWN = re.compile(
    r"!\[[^]]*\]\((?P<path>[^)]*\.svg)\)(\{[^}]*--least: (?P<least>\d+)px[^}]*\})?"
)


def pictures() -> Iterator[tuple[str, int]]:
    """The drawings on all pages, and how wide a phone shows each."""
    for page in DOCS.rglob("*.md"):
        for found in SHOWN.finditer(page.read_text()):
            file = (page.parent / found["path"]).resolve()
            yield str(file.relative_to(DOCS)), max(WIDTH, int(found["least"] or 0))


@pytest.mark.parametrize(("name", "shown"), sorted(set(pictures())))
def test_text_is_large_enough(name, shown):
    text = (DOCS / name).read_text()
    (width,) = map(float, re.findall(r'viewBox="0 0 ([\d.]+)', text))
    # matplotlib draws letters, of a font that is 100 points high.
    scales = map(float, re.findall(r"scale\(([\d.]+) -[\d.]+\)", text))
    assert 100 * min(scales) * shown / width >= LEAST
