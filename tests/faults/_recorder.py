"""A plugin for pytest, which notes what each test reaches, and how long it takes."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import pytest

_TOOL = 1  # `sys.monitoring.COVERAGE_ID`


class Recorder:
    """Notes for each test the lines of the package that it reaches.

    What the library and JAX keep in their caches is forgotten before each test, so that
    all of them reach what they are about.
    """

    def __init__(self, package: Path, to: Path) -> None:
        self.package, self.to = f"{package}/", to
        self.tests: dict[str, Any] = {}
        self.reached: dict[str, set[int]] = defaultdict(set)

    def pytest_sessionstart(self) -> None:
        """Starts to look."""
        monitoring = _monitoring()
        monitoring.use_tool_id(_TOOL, "faults")
        monitoring.register_callback(_TOOL, monitoring.events.LINE, self._line)
        monitoring.set_events(_TOOL, monitoring.events.LINE)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Stands around a test."""
        _forget(self.package)
        self.reached = defaultdict(set)
        _monitoring().restart_events()
        result = yield
        lines = {file: sorted(lines) for file, lines in self.reached.items()}
        self.tests.setdefault(item.nodeid, {})["lines"] = lines
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes how long a test took, and whether it passed."""
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
        test["seconds"] += report.duration
        test["passed"] &= report.passed

    def pytest_sessionfinish(self) -> None:
        """Writes down what was seen."""
        self.to.write_text(json.dumps(self.tests))

    def _line(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(self.package):
            file = code.co_filename.removeprefix(self.package)
            self.reached[file].add(line)
        return _monitoring().DISABLE


def _monitoring() -> Any:
    if sys.version_info < (3, 12):
        raise RuntimeError("`python -m tests.faults` needs Python 3.12")
    return sys.monitoring


def _forget(package: str) -> None:
    jax.clear_caches()
    for module in list(sys.modules.values()):
        if (getattr(module, "__file__", None) or "").startswith(package):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
