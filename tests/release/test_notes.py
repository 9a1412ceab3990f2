"""What has to be true of a commit before it is released."""

import importlib.util
import re
from pathlib import Path

import pytest

import eqloop as el

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## Unreleased

## 0.2.0 (2027-01-31)

### Added

- One thing.

## 0.1.0

- The first.

## 0.0.9
"""


@pytest.fixture
def release_notes():
    path = ROOT / ".github" / "release_notes.py"
    spec = importlib.util.spec_from_file_location("release_notes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "eqloop").mkdir()
    (tmp_path / "eqloop" / "_version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_notes_are_the_section_of_the_changelog(release_notes, checkout):
    assert release_notes.notes("v0.2.0", checkout) == "### Added\n\n- One thing.\n"


@pytest.mark.parametrize("tag", ["v0.1.0", "0.2.0", "v0.2"])
def test_another_tag_is_refused(release_notes, checkout, tag):
    with pytest.raises(ValueError, match=r"the tag must be v0\.2\.0"):
        release_notes.notes(tag, checkout)


@pytest.mark.parametrize("release", ["0.3.0", "0.0.9", "0.2"])
def test_a_release_without_notes_is_refused(release_notes, release):
    with pytest.raises(ValueError, match=f"no section `## {release}`, or an empty one"):
        release_notes.section(CHANGELOG, release)


def test_version_is_read_as_it_stands_in_the_code(release_notes):
    assert release_notes.version() == el.__version__


def test_all_that_names_the_version_agrees():
    """The newest heading of the changelog, the citation, the README and the guide."""
    citation, readme, changelog, guide = (
        (ROOT / name).read_text()
        for name in (
            "CITATION.cff",
            "README.md",
            "CHANGELOG.md",
            ".github/RELEASING.md",
        )
    )
    stated = re.findall(r"^(?:version|date-released): (.+)$", citation, re.MULTILINE)
    assert stated[0] == el.__version__
    assert "## {} ({})".format(*stated) in changelog.split("\n\n")
    assert f"[version {el.__version__}](CHANGELOG.md)" in " ".join(readme.split())
    for page in ("getting_started.md", "when_not_to_use.md"):
        assert f"eqloop {el.__version__}" in (ROOT / "docs" / page).read_text()
    assert set(re.findall(r"v(\d+\.\d+\.\d+)", guide)) == {el.__version__}
