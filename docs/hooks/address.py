"""A hook of MkDocs: the address of the repository, in the lines that clone it.

The workflow that publishes the site knows the address. Elsewhere the words stay.
"""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

WORDS = "<address of this repository>"


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Puts the address where the page has these words for it."""
    return markdown.replace(WORDS, config.repo_url or WORDS)
