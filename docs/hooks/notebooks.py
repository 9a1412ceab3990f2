"""A hook of MkDocs: notebooks are pages, with the outputs that they were saved with.

Their cells become Markdown, so they look as any other page and are found by the search.
"""

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Notebook(File):
    """A file with cells, which is a page all the same."""

    def is_documentation_page(self) -> bool:
        """MkDocs itself goes by the file's suffix."""
        return True


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Makes pages of all notebooks."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(
                Notebook(
                    file.src_uri,
                    config.docs_dir,
                    config.site_dir,
                    config.use_directory_urls,
                )
            )


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """The Markdown of a notebook; MkDocs reads other pages itself."""
    if not isinstance(page.file, Notebook):
        return None
    notebook = json.loads(Path(page.file.abs_src_path).read_text())
    return "\n\n".join(part for cell in notebook["cells"] for part in parts(cell))


def parts(cell: dict[str, Any]) -> list[str]:
    """A cell, and what came out of it."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *map(shown, cell["outputs"])]


def shown(output: dict[str, Any]) -> str:
    """An output: a picture if it is one, else its text."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        least = _least_width(base64.b64decode(picture))
        source = f'src="data:image/png;base64,{picture}" style="--least: {least}px"'
        return f'<p><img alt="what the code draws" {source}></p>'
    text = "".join(data["text/plain"]).strip("\n")
    return f"```{{.text .output}}\n{text}\n```"


def _least_width(png: bytes) -> int:
    """How many pixels of a phone a picture needs for text of 9 pixels.

    The text of the notebooks' pictures is 10 points high, and a file says how many of
    its pixels are a metre.
    """
    (width,) = struct.unpack(">I", png[16:20])
    at = png.index(b"pHYs") + 4
    (per_metre,) = struct.unpack(">I", png[at : at + 4])
    points = width / per_metre / 0.0254 * 72
    return math.ceil(9 * points / 10)
