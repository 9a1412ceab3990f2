"""The package as a whole: what importing it brings along, its version, its floors."""

import ast
import functools
import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eqloop as el

ROOT = Path(__file__).parent.parent
OPTIONAL = {"tqdm", "matplotlib", "pydot", "optax"}


@functools.cache
def modules_after(statement: str) -> set[str]:
    """The names of the modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


@pytest.fixture(scope="module")
def packages_added() -> set[str]:
    """What `import eqloop` brings, of other packages, beside `import equinox`."""
    modules = modules_after("import eqloop") - modules_after("import equinox")
    packages = {name.partition(".")[0] for name in modules}
    return packages - sys.stdlib_module_names - {"eqloop"}


def test_import_leaves_optional_dependencies_alone(packages_added: set[str]):
    assert packages_added.isdisjoint(OPTIONAL)


def test_import_brings_no_package_that_is_no_dependency(packages_added: set[str]):
    assert packages_added <= {"jax", "jaxlib", "jaxtyping", "beartype"}


@pytest.mark.parametrize("name", ["pallas", "topologies"])
def test_import_leaves_what_few_programs_need(name: str):
    added = modules_after("import eqloop") - modules_after("import equinox")
    assert not any(module.endswith(f".{name}") for module in added)


def rooms_after(statement: str) -> set[str]:
    """The rooms, and the modules beside them, that `statement` imports."""
    names = (name.split(".") for name in modules_after(statement))
    return {name[1] for name in names if name[0] == "eqloop" and len(name) > 1}


def test_rooms_are_imported_when_something_of_them_is_asked_for():
    assert rooms_after("import eqloop") == {"_version"}
    rooms = rooms_after("from eqloop import Scan")
    others = "autodiff debug diffrax fitting ir mapping oom rescheduling resuming"
    assert "loops" in rooms
    assert rooms.isdisjoint(others.split())
    assert "fitting" in rooms_after("import eqloop; eqloop.fitting")


def test_version_is_that_of_the_distribution():
    try:
        version = importlib.metadata.version("eqloop")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("eqloop is run from the checkout without being installed")
    assert el.__version__ == version


def test_public_names_are_sorted_and_there():
    names = [name for name in el.__all__ if name != "__version__"]
    assert names == sorted(names)
    assert all(hasattr(el, name) for name in el.__all__)


# The room that is imported by name, since it needs a package that may be missing.
BY_NAME = "eqloop.diffrax"


def packages() -> list[str]:
    """The package and the rooms in it."""
    found = pkgutil.walk_packages(el.__path__, f"{el.__name__}.")
    return [el.__name__, *(module.name for module in found if module.ispkg)]


@pytest.mark.parametrize("package", packages())
def test_nothing_else_is_in_a_namespace(package: str):
    if package == BY_NAME:
        pytest.importorskip("diffrax")
    if any(part.startswith("_") for part in package.split(".")):
        pytest.skip("it is no namespace of users: what it imports, it exports")
    module = importlib.import_module(package)
    inside = {found.name for found in pkgutil.iter_modules(module.__path__)}
    public = {name for name in dir(module) if not name.startswith("_")}
    # What rooms have of each other is there as well, and no user is told of it.
    body = ast.parse(Path(str(module.__file__)).read_text()).body
    own = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    exported = {name.name for node in own for name in node.names}
    listed = set(getattr(module, "__all__", ()))
    assert public - inside <= listed | (exported if package != el.__name__ else set())
    assert listed <= public | {"__version__"}


def test_the_public_namespace_is_what_is_listed_and_the_rooms():
    rooms = {name.split(".")[1] for name in packages() if name.count(".") == 1}
    rooms = {room for room in rooms if not room.startswith("_")}
    public = {name for name in dir(el) if not name.startswith("_")}
    by_name = BY_NAME.split(".")[1]
    assert public - {by_name} == {*el.__all__, *rooms} - {"__version__", by_name}


def test_oldest_versions_in_ci_are_the_floors():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = (ROOT / ".github" / "oldest.txt").read_text().splitlines()
    pins = [line for line in oldest if not line.startswith("#")]
    # What follows a floor are single versions that are broken.
    floors = [needed.partition(",")[0] for needed in project["dependencies"]]
    assert pins == [floor.replace(">=", "==") for floor in floors]
