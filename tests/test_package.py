"""The package as a whole: what importing it costs, and its version."""

import importlib.metadata
import subprocess
import sys

import pytest

import eqloop as el

OPTIONAL = ("tqdm", "matplotlib", "pydot", "optax")


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.fixture(scope="module")
def added_by_eqloop() -> set[str]:
    return modules_after("import eqloop") - modules_after("import equinox")


def test_import_leaves_optional_dependencies_alone(added_by_eqloop: set[str]):
    assert added_by_eqloop.isdisjoint(OPTIONAL)


def test_import_brings_little_beside_eqloop_itself(added_by_eqloop: set[str]):
    packages = {name.partition(".")[0] for name in added_by_eqloop}
    third_party = packages - set(sys.stdlib_module_names) - {"eqloop"}
    assert third_party <= {"jax", "beartype"}


def test_version_is_that_of_the_distribution():
    assert el.__version__ == importlib.metadata.version("eqloop")


def test_public_names_are_there():
    assert all(hasattr(el, name) for name in el.__all__)
