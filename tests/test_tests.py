"""The tests themselves: none imports another, and what they assert can fail."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import eqloop as el

from .asserts import assert_close, assert_raises, assert_same

TESTS = Path(__file__).parent


def imported(path: Path) -> Iterator[str]:
    """The last name of each module that a file imports from, or imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")[-1:]
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.name.split(".")[-1] for alias in node.names)


def test_no_test_is_imported():
    tests = {path.stem for path in TESTS.rglob("test_*.py")}
    found = [
        (path.relative_to(TESTS).as_posix(), name)
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if name in tests
    ]
    assert found == []


def test_what_marks_a_case_marks_no_test():
    """It would be a case, and not be run."""
    found = [
        (path.relative_to(TESTS).as_posix(), node.name)
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(mark) == "slow" for mark in node.decorator_list)
    ]
    assert found == []


@pytest.mark.parametrize("said", ["ValueError: Scan: … 3", "TypeError: 3 … Scan: `f`"])
def test_an_error_of_another_kind_or_order_is_noticed(said: str):
    wrong = lambda: el.Scan(3)
    assert_raises(wrong, "TypeError: Scan: `f` … 3")
    with pytest.raises(AssertionError):
        assert_raises(wrong, said)


ONES = jnp.ones(3)


@pytest.mark.parametrize("other", [ONES + 1, ONES[:1], ONES.astype(int), [ONES], "a"])
def test_another_tree_is_noticed(other: Any):
    assert_close({"x": ONES, "s": "a"}, {"x": ONES * (1 + 1e-6), "s": "a"})
    for check in (assert_close, assert_same):
        with pytest.raises(AssertionError):
            check({"x": ONES, "s": "a"}, {"x": other, "s": "a"})
