"""Which cases of a test are left to the weekly run."""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# Of a test with one parameter and at most so many cases, every so manyth is run.
_EVERY = ((5, 2), (12, 3), (math.inf, 4))


def slow(*case: Any, id: str | None = None) -> Any:
    """A case for `pytest.mark.parametrize` that is as slow as it is like the others."""
    return pytest.param(*case, marks=pytest.mark.slow, id=id)


def slow_if(is_slow: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Cases of one parameter, some of which are slow."""
    return [slow(case) if is_slow(case) else case for case in cases]


def leave_some(items: Iterable[pytest.Item]) -> None:
    """Marks some cases of tests that are `sampled` as slow, the same ones each time.

    Of a test with one parameter, every second case is run, or every third or fourth of
    many. Of a test with several, as few as have every value of each, in other pairs.
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
    # Which value of each parameter a case has.
    known = collections.defaultdict[str, dict[int, int]](dict)
    number = lambda name, value: known[name].setdefault(id(value), len(known[name]))
    values = [
        tuple(
            (name, number(name, value)) for name, value in case.callspec.params.items()
        )
        for case in cases
    ]
    # Those that go together are one. What one value is left of was chosen by hand.
    apart = set(zip(*(dict(v).values() for v in values), strict=True))
    varying = sum(len(set(column)) > 1 for column in apart)
    if len(apart) == 1 or (varying == 1 and len(cases) > _EVERY[1][0]):
        every = next(every for most, every in _EVERY if len(cases) <= most)
        return [case for i, case in enumerate(cases) if i % every]
    left, runs = list(range(len(cases))), collections.Counter[tuple[str, int]]()
    # Next comes what has most values that no case has had, and else those had least.
    worth = lambda i: (
        -sum(not runs[v] for v in values[i]),
        sum(runs[v] for v in values[i]),
    )
    while any(not runs[value] for i in left for value in values[i]):
        left.remove(chosen := min(left, key=worth))
        runs.update(values[chosen])
    return [cases[i] for i in left]
