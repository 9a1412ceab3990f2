"""Which cases of a test are left to the weekly run."""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# A test has many cases from this number on.
_MANY = 6


def slow(*case: Any, id: str | None = None) -> Any:
    """A case for `pytest.mark.parametrize` that is as slow as it is like the others."""
    return pytest.param(*case, marks=pytest.mark.slow, id=id)


def slow_if(is_slow: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of one parameter, some of which are slow."""
    return [slow(case) if is_slow(case) else case for case in cases]


def leave_some(items: Iterable[pytest.Item]) -> None:
    """Marks some cases of tests that are `sampled` as slow, the same ones each time.

    Of a test with one parameter, every second case is run, or every third of many. Of a
    test with several, as many as it takes for every value of each to be there.
    """
    tests = collections.defaultdict[str, list[pytest.Function]](list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("sampled")
            and not item.get_closest_marker("slow")
        ):
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        for case in _left(cases):
            case.add_marker(pytest.mark.slow)


def _left(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Of the cases of a test those that are not run."""
    # Which value of each parameter a case has. Those that go together are one.
    known = collections.defaultdict[str, dict[int, int]](dict)
    number = lambda name, value: known[name].setdefault(id(value), len(known[name]))
    values = [
        tuple(
            (name, number(name, value)) for name, value in case.callspec.params.items()
        )
        for case in cases
    ]
    if len(set(zip(*(dict(v).values() for v in values), strict=True))) == 1:
        every = 2 if len(cases) < _MANY else 3
        return [case for i, case in enumerate(cases) if i % every]
    left, seen = list[pytest.Function](), set[tuple[str, int]]()
    for case, own in zip(cases, values, strict=True):
        if seen.issuperset(own):
            left.append(case)
        seen.update(own)
    return left
