"""A part of the table of operations by places; the weekly run has all of it."""

import dataclasses
from collections.abc import Iterator

import jax
import pytest

from ..marks import slow
from .case import Case
from .cases import all_cases
from .complete import missing, without_case
from .table import outcomes


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
    """A case of each operation, of 32 bits if there is one; values alone."""
    usual = {"float32", "int32", "bool"}
    is_usual = lambda case: {str(x.dtype) for x in case.args} <= usual
    found = dict[str, Case]()
    for case in (*filter(is_usual, cases), *cases):
        found.setdefault(case.operation, dataclasses.replace(case, has_slope=False))
    return list(found.values())


def test_each_primitive_has_a_case(cases: list[Case]):
    assert without_case(cases) == []


@pytest.mark.slow
def test_each_parameter_is_varied(cases: list[Case]):
    assert missing(cases) == []


# The first is the quickest of the places.
_PLACES = "ir", "fit", "ir", "steps", "ir", "ir"


@pytest.mark.parametrize("part", range(len(_PLACES)))
def test_an_operation_is_run_somewhere_each_day(cases: list[Case], part: int):
    some = [case for case in _one_of_each(cases)[part :: len(_PLACES)] if case.is_taken]
    found = outcomes(some, [_PLACES[part]])
    assert [one for one in found if one.kind in ("wrong", "error")] == []


@pytest.mark.parametrize(
    "name", ["reshape", slow("sort"), slow("gather"), slow("while"), slow("add")]
)
def test_what_a_kernel_does_not_do_is_refused(cases: list[Case], name: str):
    some = [case for case in cases if case.operation == name][::10]
    found = outcomes([case for case in some if case.is_taken], ["fused"])
    assert [one for one in found if one.kind in ("wrong", "error")] == []
