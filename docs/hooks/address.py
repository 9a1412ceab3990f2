"""A hook of MkDocs: the address of the repository, where pages clone it or link to it.

The workflow that publishes the site knows the address. Elsewhere the words stay, and
links into the source are their text.
"""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

WORDS = "<address of this repository>"

# As the forge reads it, which shows these pages as well.
_SOURCE = re.compile(r"\[(`[^`\]]+`)\]\((?:\.\./)+(eqloop/[^)#]*)\)")


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Puts the address where the page has these words for it, and where it links."""
    address = config.repo_url
    link = rf"[\1]({(address or '').rstrip('/')}/tree/HEAD/\2)" if address else r"\1"
    return _SOURCE.sub(link, markdown).replace(WORDS, address or WORDS)
