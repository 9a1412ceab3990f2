"""Examples compute for minutes: their programs are worth what optimising them takes."""

import os

import pytest

from ..conftest import QUICK_FLAGS


@pytest.fixture(autouse=True)
def optimised_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts have the flags of the user alone."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].removeprefix(QUICK_FLAGS))
