"""Runs the canaries on each jaxlib that is allowed, in an environment of its own."""

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]


def allowed() -> list[str]:
    """The versions of jaxlib on PyPI that may be installed, the oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = map(Requirement, project["dependencies"])
    versions = next(each.specifier for each in needs if each.name == "jaxlib")
    asked = [sys.executable, "-m", "pip", "index", "versions", "jaxlib"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    (line,) = re.findall(r"Available versions: (.*)", told)
    return within(versions, line.split(", "))


def within(allowed: SpecifierSet, versions: list[str]) -> list[str]:
    """Those that are allowed, the oldest first; PyPI lists the newest first."""
    return list(allowed.filter(reversed(versions)))


def run_each() -> int:
    """Runs them all; 1 if any fails."""
    results = [_run(version) for version in allowed()]
    return max(results, default=1)


def _run(version: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        same = [f"jax=={version}", f"jaxlib=={version}"]
        install = [python, "-m", "pip", "install", "--quiet", *same, str(ROOT)]
        subprocess.run(install, check=True)
        table = [python, "-m", "tests.canaries"]
        return min(subprocess.run(table, cwd=ROOT).returncode, 1)
