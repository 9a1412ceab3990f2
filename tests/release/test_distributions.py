"""What is published: built, checked, and installed where there was nothing before."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import eqloop as el

ROOT = Path(__file__).parents[2]

CONSTRAINTS: dict[str, list[str | Path]] = {
    "oldest": ["-c", ROOT / ".github" / "oldest.txt"],
    "newest": [],
}

# Rooms of the tests that take a few minutes, and run every kind of derivative.
QUICK = [
    "tests/autodiff",
    "tests/loops/test_scan.py",
    "tests/loops/test_while_loops.py",
]

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.skipif(
            importlib.util.find_spec(tool) is None,
            reason=f"{tool} is missing: python -m pip install -e '.[release]'",
        )
        for tool in ("build", "twine")
    ),
]


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; if it fails, its output is the error's message."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={name: os.environ[name] for name in os.environ if name != "PYTHONPATH"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (sdist,) = built.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(file.read(name).decode())


@pytest.fixture(scope="module", params=CONSTRAINTS)
def constraints(request: pytest.FixtureRequest) -> list[str | Path]:
    """What `pip install` is told: to take the oldest versions, or nothing."""
    return CONSTRAINTS[request.param]


def environment(home: Path, what: str | Path, constraints: list[str | Path]) -> Path:
    """The interpreter of a new environment in which this alone was installed."""
    venv.create(home, with_pip=True)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", *constraints, what, cwd=home)
    return python


@pytest.fixture(scope="module")
def fresh_python(
    wheel: Path,
    constraints: list[str | Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The interpreter of a new environment in which there is the wheel alone."""
    return environment(tmp_path_factory.mktemp("fresh"), wheel, constraints)


def test_twine_has_nothing_to_say(wheel: Path, sdist: Path):
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT)


def test_wheel_holds_the_package_alone(wheel: Path):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = f"eqloop-{el.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"eqloop", about}
    assert {"eqloop/py.typed", f"{about}/licenses/LICENSE"} <= names
    modules = (ROOT / "eqloop").rglob("*.py")
    assert {path.relative_to(ROOT).as_posix() for path in modules} <= names


def test_sdist_holds_what_git_does(sdist: Path):
    try:
        tracked = set(run("git", "ls-files", cwd=ROOT).split("\n")) - {""}
    except (AssertionError, FileNotFoundError):
        pytest.skip("this is no checkout of git")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {name for name in tracked if (ROOT / name).exists()} <= names


def test_description_has_no_link_into_the_repository(metadata: Message):
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert description.startswith("# eqloop")
    assert "`pip install eqloop`" in description
    targets = re.findall(r"\]\(([^)\s]+)\)", description)
    assert targets
    assert all(target.startswith("https://") for target in targets)


def test_metadata_is_of_this_version(metadata: Message):
    assert metadata["Version"] == el.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_example_of_the_readme_runs(fresh_python: Path):
    text = (ROOT / "README.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    program = fresh_python.parent.parent / "example.py"
    program.write_text(example + "\nprint(el.__file__)\n")
    # Before, the budget says on the log that it plans.
    *_, file = run(fresh_python, "-P", program, cwd=program.parent).splitlines()
    assert Path(file).is_relative_to(program.parent)


def test_what_is_tried_on_every_system(fresh_python: Path):
    script = ROOT / ".github" / "try_wheel.py"
    said = run(fresh_python, "-P", script, cwd=fresh_python.parent)
    assert "all is well" in said


def test_public_names_are_there(fresh_python: Path):
    code = "import eqloop, eqloop.ir; print(*eqloop.__all__)"
    names = run(fresh_python, "-P", "-c", code, cwd=fresh_python.parent)
    assert names.split() == el.__all__


def test_quick_tests_pass_from_the_sdist(
    sdist: Path, constraints: list[str | Path], tmp_path: Path
):
    python = environment(tmp_path / "fresh", f"{sdist}[test]", constraints)
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(unpacked / "eqloop")  # what is installed is to be imported
    said = run(python, "-m", "pytest", "-q", *QUICK, cwd=unpacked)
    assert " passed" in said
