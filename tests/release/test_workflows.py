"""What the workflows of a release do, and what they leave to a person."""

import re
import tomllib
from pathlib import Path

import eqloop as el

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
RELEASE = (WORKFLOWS / "release.yml").read_text()
PUBLISH = (WORKFLOWS / "publish.yml").read_text()


def test_the_wheel_is_tried_with_every_python_on_three_systems():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = "Programming Language :: Python :: 3."
    versions = [c for c in project["classifiers"] if c.startswith(start)]
    minors = [f'"3.{version.removeprefix(start)}"' for version in versions]
    assert f"python: [{', '.join(minors)}]" in RELEASE
    for minor in minors:
        assert f"{{ system: ubuntu-latest, python: {minor}, jax: oldest }}" in RELEASE
    systems = re.findall(r"system: \[(.*)\]", RELEASE)[0]
    names = ("ubuntu", "macos", "windows")
    assert systems == ", ".join(f"{name}-latest" for name in names)


def test_nothing_is_uploaded_before_a_person_publishes_the_draft():
    assert "--draft" in RELEASE
    assert "pypi-publish" not in RELEASE
    assert "id-token" not in RELEASE
    assert re.search(r"^on:\n  release:\n    types: \[published\]$", PUBLISH, re.M)
    assert "pypi-publish" in PUBLISH


def test_the_guides_have_the_one_command():
    command = f"gh release edit v{el.__version__} --draft=false"
    guide = (ROOT / ".github" / "RELEASING.md").read_text()
    assert re.findall(r"```sh\n(.*?)\n```", guide) == [command]
    assert f"`{command}`" in (ROOT / "CONTRIBUTING.md").read_text()
    for name in set(re.findall(r"`(\.?\w+/[\w/.]+)`", guide)):
        assert (ROOT / name).exists(), name


def test_actions_are_pinned():
    for text in (RELEASE, PUBLISH):
        assert all(re.findall(r"uses: \S+@([0-9a-f]{40} # v)?", text))
