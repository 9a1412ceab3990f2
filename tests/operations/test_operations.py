"""A part of the table of operations by places; the weekly run has all of it."""

from collections.abc import Iterator

import jax
import pytest

from .case import Case
from .cases import all_cases
from .complete import missing, without_case
from .places import PLACES
from .table import outcomes

# Several operations are in one program there, and none is refused.
_QUICK = ("fit", "steps", "ir", "chunks")


@pytest.fixture(scope="module", autouse=True)
def _with_64_bits() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return all_cases()


def _one_of_each(cases: list[Case]) -> list[Case]:
    """The first case of each operation, in the middle of those that it has."""
    by_operation = dict[str, list[Case]]()
    for case in cases:
        by_operation.setdefault(case.operation, []).append(case)
    middle = lambda some: some[len(some) // 2 :] + some
    found = (next(filter(_is_taken, middle(some)), None) for some in by_operation.values())
    return [case for case in found if case is not None]


def _is_taken(case: Case) -> bool:
    return case.is_taken


def test_each_primitive_has_a_case(cases: list[Case]):
    assert without_case(cases) == []


@pytest.mark.slow
def test_each_parameter_is_varied(cases: list[Case]):
    assert missing(cases) == []


@pytest.mark.parametrize("at", range(4))
def test_an_operation_is_run_somewhere_each_day(cases: list[Case], at: int):
    some = _one_of_each(cases)[at::4]
    found = outcomes(some, _QUICK[at : at + 1])
    assert [one for one in found if one.kind in ("wrong", "error")] == []


@pytest.mark.parametrize("name", ["sort", "gather", "while", "reshape", "add"])
def test_what_a_kernel_does_not_do_is_refused(cases: list[Case], name: str):
    some = [case for case in cases if case.operation == name][::40]
    found = outcomes(some, ["fused"])
    assert [one for one in found if one.kind in ("wrong", "error")] == []


def test_places_are_those_that_the_page_names():
    assert {"fused", "fit", "chunks", "steps", "ir", "python"} <= {*PLACES}
