"""The text of pictures can be read on a phone, where a page is 358 pixels wide.

A picture is shown as wide as the page, or as wide as its `--least` says, if that is
more. What size text has is told from a drawing, but not from an image: the only one is
that of the README, whose text is as large as matplotlib makes it if it is not told.
"""

import importlib.util
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WIDTH, LEAST = 358, 9
SHOWN = re.compile(
    r"!\[[^]]*\]\((?P<path>[^)]*\.\w+)\)(\{[^}]*--least: (?P<least>\d+)px[^}]*\})?"
)


def pictures() -> Iterator[tuple[str, int]]:
    """The drawings on all pages, and how wide a phone shows each."""
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for found in SHOWN.finditer(page.read_text()):
            file = (page.parent / found["path"]).resolve()
            yield str(file.relative_to(DOCS)), max(WIDTH, int(found["least"] or 0))


def inches(png: bytes) -> float:
    """How wide an image was drawn."""
    (width,) = struct.unpack(">I", png[16:20])
    at = png.index(b"pHYs") + 4
    (per_metre,) = struct.unpack(">I", png[at : at + 4])
    return width / per_metre / 0.0254


@pytest.mark.parametrize(("name", "shown"), sorted(set(pictures())))
def test_text_is_large_enough(name, shown):
    if name == "images/quickstart.png":
        assert 10 * shown / (72 * inches((DOCS / name).read_bytes())) >= LEAST
        return
    text = (DOCS / name).read_text()
    (width,) = map(float, re.findall(r'viewBox="0 0 ([\d.]+)', text))
    # matplotlib draws letters, of a font that is 100 points high.
    scales = map(float, re.findall(r"scale\(([\d.]+) -[\d.]+\)", text))
    assert 100 * min(scales) * shown / width >= LEAST


def test_images_of_notebooks_are_wide_enough():
    """Their text is 10 points high, which no notebook changes."""
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    spec = importlib.util.spec_from_file_location("hook", DOCS / "hooks/notebooks.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    images = 0
    for notebook in (DOCS / "examples").glob("*.ipynb"):
        assert "font" not in (ROOT / f"examples/{notebook.stem}.py").read_text()
        for cell in json.loads(notebook.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                if "image/png" in output.get("data", {}):
                    text = hook.shown(output)
                    (least,) = map(int, re.findall(r"--least: (\d+)px", text))
                    png = hook.base64.b64decode("".join(output["data"]["image/png"]))
                    assert 10 * least / (72 * inches(png)) >= LEAST - 1e-6
                    images += 1
    assert images
