"""A plugin for pytest, which notes the errors that the tests see."""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ._messages import Message
from ._sites import find

ROOT = Path(__file__).parents[2]
_SKIPPED = {"test_planted.py"}  # the same error in many long programs


class Recorder:
    """Runs the tests of wrong calls, and notes which error came from where.

    An error is noted as it leaves the block of a `pytest.raises`.
    """

    def __init__(self) -> None:
        self.seen: dict[str, set[Message]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what is no test of an error."""
        items[:] = filter(_mentions_raises, items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Stands between the test and `pytest.raises`."""
        raises = pytest.raises
        with pytest.MonkeyPatch.context() as patch:
            noting = lambda *args, **kwargs: _Noting(raises(*args, **kwargs), self.note)
            patch.setattr(pytest, "raises", noting)
            return (yield)

    def note(self, error: BaseException) -> None:
        """Notes an error, if it is one of the library's own."""
        if origin := _origin(error):
            message = Message(type(error).__name__, _stable(str(error)))
            self.seen[origin].add(message)


def record() -> tuple[dict[str, set[Message]], bool]:
    """Runs the tests of errors, in this process.

    Returns:
        All messages by where they come from, and whether the tests passed.
    """
    recorder = Recorder()
    options = ["-q", "--numprocesses=0", "--no-header", "--disable-warnings"]
    tests = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.raises" in path.read_text() and path.name not in _SKIPPED
    ]
    failed = pytest.main([*options, *tests], plugins=[recorder])
    return recorder.seen, not failed


class _Noting:
    def __init__(self, raises: Any, note: Callable[[BaseException], None]) -> None:
        self.raises, self.note = raises, note

    def __enter__(self) -> Any:
        return self.raises.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        if error is not None:
            self.note(error)
        return self.raises.__exit__(kind, error, traceback)


def _mentions_raises(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    return function is not None and "pytest.raises" in inspect.getsource(function)


def _origin(error: BaseException) -> str | None:
    """The innermost statement of the library that raises, of those on the way."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        found = find(path, traceback.tb_lineno) or found
        traceback = traceback.tb_next
    return str(found) if found else None


def _stable(message: str) -> str:
    """A message without what differs from one run or machine to the next."""
    # What Equinox adds to a message, where there is a program around it.
    *_, message = message.split("equinox.EquinoxRuntimeError: ")
    message, *_ = message.split("\n\n---")
    message = message.replace(f"{ROOT}/", "").strip()
    message = re.sub(r"(\.py):\d+", r"\1:…", message)
    return re.sub(r"0x[0-9a-f]{6,}", "0x7f…", message)
