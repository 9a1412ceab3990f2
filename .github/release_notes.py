"""Prints what the changelog says of a version, or why it cannot be released.

    python .github/release_notes.py v0.1.0

With `--version` in place of a tag, it prints the version. The tag must be that of the
version in `eqloop/_version.py`, and `CHANGELOG.md` must have a section of that name.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version(root: Path = ROOT) -> str:
    """The version that stands in the code."""
    text = (root / "eqloop" / "_version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def section(changelog: str, release: str) -> str:
    """What stands under the heading of a release.

    Args:
        changelog: The text of a changelog whose headings of releases are `## 0.1.0`,
            with or without a date after it.
        release: The version.

    Raises:
        ValueError: If there is no such heading, or nothing under it.
    """
    _, *sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    for text in sections:
        heading, _, body = text.partition("\n")
        if heading.split(" ")[0] == release and body.strip():
            return body.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section `## {release}`, or an empty one.")


def notes(tag: str, root: Path = ROOT) -> str:
    """The notes of the release of a tag.

    Raises:
        ValueError: If the tag is not that of the version, or the changelog says
            nothing of it.
    """
    if tag != f"v{version(root)}":
        raise ValueError(
            f"The tag is {tag}, but eqloop/_version.py says {version(root)}: the tag "
            f"must be v{version(root)}."
        )
    return section((root / "CHANGELOG.md").read_text(), tag.removeprefix("v"))


if __name__ == "__main__":
    try:
        is_version = sys.argv[1:] == ["--version"]
        print(version() + "\n" if is_version else notes(*sys.argv[1:]), end="")
    except ValueError as error:
        sys.exit(str(error))
