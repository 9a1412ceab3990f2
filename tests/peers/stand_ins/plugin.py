"""A pytest plugin: runs a suite of others on our loops (`-p stand_ins.plugin`)."""

import contextlib
import inspect
import re

import pytest

from . import _expected
from ._patch import STAND_INS, stand_in

_LOOP = re.compile(r"\b(scan|while_loop|fori_loop|lax\.map)\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which suite this is, and what stands in for its loops."""
    group = parser.getgroup("peers")
    group.addoption("--peer-suite", choices=_expected.SUITES, required=True)
    group.addoption("--peer-variant", choices=STAND_INS, required=True)
    group.addoption(
        "--peer-only-loops",
        action="store_true",
        help="only tests whose source names a loop",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Puts our loops in place before their modules, which keep loops in globals."""
    stack = contextlib.ExitStack()
    stack.enter_context(stand_in(session.config.getoption("--peer-variant")))
    session.config.add_cleanup(stack.close)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out what has no loop, and marks what is expected to fail."""
    if config.getoption("--peer-only-loops"):
        others = [item for item in items if not _has_loop(item)]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)
    entries = _expected.load(
        config.getoption("--peer-suite"), config.getoption("--peer-variant")
    )
    names = {item: _expected.name_of(item.nodeid) for item in items}
    for entry in entries:
        chosen = [item for item in items if entry.matches(names[item])]
        for item in chosen:
            item.add_marker(
                pytest.mark.xfail(reason=str(entry), strict=True, run=entry.run)
            )


def _has_loop(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    try:
        return bool(_LOOP.search(inspect.getsource(inspect.unwrap(item.obj))))
    except (OSError, TypeError):  # written by no one: it may well have one
        return True
