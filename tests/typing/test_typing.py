"""What pyright, and so an editor, makes of the library: the files beside this one.

They are never run. In each of them `assert_type` says what is inferred, and what is
wrong is marked as an error: pyright objects to a mark that is not needed. One of the
files, `both.py`, is for mypy as well.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

import eqloop as el

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parent.parent

needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
)

needs_mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed"
)


def pyright(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    # It looks for what is installed beside the first Python that it finds.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    result = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    return json.loads(result.stdout)


@needs_pyright
def test_what_is_inferred_and_what_is_an_error():
    found = pyright(str(_HERE))
    assert found["summary"]["filesAnalyzed"] >= 8
    problems = [
        f"{item['file']}:{item['range']['start']['line'] + 1}: {item['message']}"
        for item in found["generalDiagnostics"]
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@needs_mypy
def test_what_mypy_infers(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}"]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@needs_pyright
def test_no_public_type_is_unknown():
    found = pyright("--verifytypes", "eqloop", "--ignoreexternal")
    assert found["typeCompleteness"]["completenessScore"] == 1


def test_every_public_name_is_used():
    text = "\n".join(path.read_text() for path in _HERE.glob("*.py"))
    used = set(re.findall(r"\bel\.(\w+)", text))
    assert set(el.__all__) <= used
