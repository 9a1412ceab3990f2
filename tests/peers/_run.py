"""Fetches a suite, and runs it on our loops."""

import os
import subprocess
import sys
from pathlib import Path

from ._suites import Suite

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
_NO_TESTS = 5  # pytest's status if all were left out


def fetch(suite: Suite, folder: Path) -> None:
    """Clones the repository of a suite, at the version that is installed."""
    options = ["--quiet", "--depth", "1", "--branch", suite.installed_tag]
    subprocess.run(
        ["git", "clone", *options, suite.repository, str(folder)], check=True
    )


def run(name: str, suite: Suite, checkout: Path, options: list[str]) -> list[str]:
    """Runs each file by each variant, in a process of its own.

    Loops stay patched for as long as a process lives, and so do the settings of JAX
    that a file makes.

    Returns:
        The files that failed, with their variants.
    """
    failed: list[str] = []
    for variant in suite.variants:
        for file in suite.files + suite.mixed:
            print(f"== {name}: {file}, {variant}", flush=True)
            settings = [f"--peer-suite={name}", f"--peer-variant={variant}"]
            if file in suite.mixed:
                settings.append("--peer-only-loops")
            arguments = [f"{suite.folder}/{file}", *suite.options, *settings, *options]
            if _pytest(checkout, arguments) not in (0, _NO_TESTS):
                failed.append(f"{file}, {variant}")
    return failed


def _pytest(checkout: Path, arguments: list[str]) -> int:
    # Not as `tests.peers`: Equinox's tests are in a package `tests` of their own.
    path = os.pathsep.join([str(_HERE), str(_ROOT)])
    command = [sys.executable, "-m", "pytest", "-p", "stand_ins.plugin", "-q"]
    config = ["-c", "pyproject.toml", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
    return subprocess.run(
        [*command, *config, *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    ).returncode
