"""A hook of MkDocs: what one searches for is more often in some pages than in others.

A word such as `jit` or `plan` is in most error messages and in many tables of figures.
Whoever searches for it wants to know how it is done.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# How much a hit counts, by the beginning of the address; 1 on all other pages. If there
# are several, the last one counts.
BOOSTS = {
    "recipes/": 2.0,
    "recipes/index": 1.0,
    "guides/": 2.0,
    "guides/while_loops": 3.0,  # the search itself ignores the word "while"
    "symptoms": 2.0,
    "how_": 0.5,
    "coming_from/": 0.5,
    "contributing": 0.3,
    "changelog": 0.2,
    "benchmarks": 0.2,
    "errors": 0.2,
}


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> None:
    """Tells the search how much the page counts."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
