"""Which cases of a test are left to the weekly run."""

from typing import Any

import pytest


def slow(*case: Any, id: str | None = None) -> Any:
    """A case for `pytest.mark.parametrize` that is as slow as it is like the others."""
    return pytest.param(*case, marks=pytest.mark.slow, id=id)
