"""Which cases of a test are left to the weekly run."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*case: Any, id: str | None = None) -> Any:
    """A case for `pytest.mark.parametrize` that is as slow as it is like the others."""
    return pytest.param(*case, marks=pytest.mark.slow, id=id)


def slow_if(is_slow: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of one parameter, some of which are slow."""
    return [slow(case) if is_slow(case) else case for case in cases]
