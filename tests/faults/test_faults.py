"""The tool itself: what it changes, and that tests notice it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ._faults import ROOT, all_faults, explained, faults, sample
from ._planted import named_in, planted

TOY = '''"""A module: 1 + 1 is no code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Toy:
    size: int | None = 3

    def total(self, x, rows: "int | None" = 2):
        """The sum: not 2."""
        if not rows:
            raise ValueError(f"{rows} is less than {self.size + 1}")
        return x.sum(0) if rows < 2 else [*x, *x]

    def __repr__(self):
        return "Toy" + "()"


def pick(flags, x):
    check(x)
    return where(any(flags), x[1:], min(x, True))
'''
CHANGED = {
    ("size: int | None = 3", "= 4"),
    ('def total(self, x, rows: "int | None" = 2):', '"int | None" = 3):'),
    ("if not rows:", "if (rows):"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "x.sum(0) if rows <= 2 else"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "return x[0] if rows"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "x.sum(1) if rows"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "if rows < 3 else"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "if not (rows < 2) else"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "else [*(), *x]"),
    ("return x.sum(0) if rows < 2 else [*x, *x]", "else [*x, *()]"),
    ("check(x)", "pass"),
    ("return where(any(flags), x[1:], min(x, True))", "where(all(flags)"),
    ("return where(any(flags), x[1:], min(x, True))", "x[2:]"),
    ("return where(any(flags), x[1:], min(x, True))", "(any(flags), x,"),
    ("return where(any(flags), x[1:], min(x, True))", "max(x"),
    ("return where(any(flags), x[1:], min(x, True))", "False"),
    ("return where(any(flags), x[1:], min(x, True))", "min(x, True), x[1:])"),
}


def test_changes_what_is_run_and_nothing_else(tmp_path):
    file = tmp_path / "toy.py"
    file.write_text(TOY)
    found = faults(file, "toy.py")
    assert len(found) == len(CHANGED)
    for before, piece in CHANGED:
        (fault,) = (f for f in found if f.before == before and piece in f.after)
        assert fault.function in ("Toy", "Toy.total", "pick")
        assert fault.text != TOY
        first, last = fault.lines
        assert before == " ".join(TOY.splitlines()[first - 1 : last])[-len(before) :]


def test_operators_keep_their_parentheses(tmp_path):
    file = tmp_path / "toy.py"
    file.write_text("def f(a, b):\n    return (a + b) * (a - b)\n")
    assert "return (a + b) + (a - b)" in {f.after for f in faults(file, "toy.py")}


def test_a_condition_may_have_several_lines(tmp_path):
    file = tmp_path / "toy.py"
    lines = (
        "def f(a, b):",
        "    if (",
        "        a",
        "        or b",
        "    ):",
        "        g()",
    )
    file.write_text("\n".join(lines))
    assert {fault.lines for fault in faults(file, "toy.py")} == {(2, 5), (6, 6)}


def test_a_sample_is_the_same_every_time_and_takes_turns():
    groups = all_faults()
    drawn = sample(groups, 30, 0)
    assert drawn == sample(groups, 30, 0) != sample(groups, 30, 1)
    for group in groups:
        assert len(set(group) & set(drawn)) == 10


def test_what_is_explained_may_be_planted():
    """When the code has changed, the explanation goes with it."""
    possible = {fault for group in all_faults() for fault in group}
    assert set(explained()) <= possible


def test_the_fixed_list_can_be_planted():
    """When a line has changed, its fault goes with it."""
    faults = planted()
    assert len(faults) == 51
    for fault in faults:
        assert fault.text(ROOT) != (ROOT / fault.path).read_text()
    for path in named_in(faults):
        assert (ROOT / path).exists()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package with a test of its own."""
    root = tmp_path / "project"
    for name, text in {
        "pytest.ini": "[pytest]\n",
        "toy/__init__.py": "def add(a, b):\n    return a + b\n\ndef more(a):\n"
        "    while a < 3:\n        a = a + 1\n    return a\n",
        "tests/__init__.py": "",
        "tests/test_toy.py": "from toy import add, more\n\n"
        "def test_add():\n    assert add(2, 3) == 5\n\n"
        "def test_zero():\n    assert add(0, 0) == 0\n\n"
        "def test_more():\n    assert more(3) == 3 == more(1)\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SCRIPT = """
import json, sys
from pathlib import Path
from tests.faults._faults import faults
from tests.faults._runner import Checkout

root, file = Path(sys.argv[1]), "toy/__init__.py"
planted = {fault.after: fault.text for fault in faults(root / file, file)}
checkout = Checkout(root, Path(sys.argv[2]), imports=())

def passes(after, test):
    tests = [f"tests/test_toy.py::{test}"]
    return checkout.passes_with(file, planted[after], tests, package="toy", seconds=20)

results = [
    checkout.run(["tests"], package="toy"),
    passes("return a - b", "test_add"),
    passes("return a - b", "test_zero"),
    passes("while a <= 3:", "test_more"),
    passes("a = a - 1", "test_more"),  # it never ends
    checkout.run(["tests"], package="toy"),
]
print(json.dumps(results))
"""


@pytest.mark.slow
def test_faults_are_found_by_the_tests_that_see_them(project, tmp_path):
    # In a process of its own: this one has threads, and cannot be forked.
    command = [sys.executable, "-c", SCRIPT, project, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == [True, False, True, False, False, True]
