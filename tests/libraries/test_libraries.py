"""Gradients through the loops of other libraries, and the table of them.

The weekly run measures memory and time as well: `python -m tests.libraries`.
"""

from pathlib import Path

import jax
import pytest

import eqloop as el

from ..compiling import AS_USED
from ..marks import slow
from ._cases import CASES
from ._judging import TOLERANCE, Found, distance
from ._page import table, with_rows

RECIPE = Path(__file__).parents[2] / "docs/recipes/my_loop_is_in_a_library.md"
ROW = Found(plain=4_000_000, budget=900_000, taken=950_000, seconds=(3, 2), error=0.0)


@pytest.fixture
def standard():
    """JAX as libraries expect it: arrays of several types and ranks may meet."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("standard")
@pytest.mark.parametrize("case", [slow(case, id=case.name) for case in CASES])
def test_the_gradient_is_the_same_in_less_memory(case):
    if case.missing:
        pytest.skip(f"needs {', '.join(case.missing)}: the extra `libraries`")
    loss, args = case.make()
    frugal = el.Reschedule(loss, el.Recursive(16), **dict(case.settings))
    reference = case.reference or jax.value_and_grad
    plain, ours = (
        jax.jit(f).lower(*args).compile(AS_USED)
        for f in (reference(loss), jax.value_and_grad(frugal))
    )
    assert distance(ours(*args), plain(*args)) <= TOLERANCE
    if case.reference is None:
        sizes = [p.memory_analysis().temp_size_in_bytes for p in (ours, plain)]
        assert sizes[0] < sizes[1] / 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"seconds": (2, 3)}, []),
        ({"taken": 1_000_001}, ["of the memory"]),
        ({"plain": None, "taken": 10**9}, []),
        ({"seconds": (4, 3)}, ["1.33 times as slow"]),
        ({"error": 0.5}, ["another gradient, by 0.5"]),
        ({"error": float("nan")}, ["another gradient, by nan"]),
    ],
)
def test_what_is_wrong(changed, said):
    found = Found(**{**vars(ROW), "seconds": (1, 1), **changed})
    assert len(found.wrong) == len(said)
    assert all(b in a for a, b in zip(found.wrong, said, strict=True))


def test_rows_of_a_page_are_replaced_and_kept_in_order():
    first, second, third = (case.name for case in CASES[:3])
    page = f"# Title\n\n{table({third: ROW, first: ROW})}\n\nAnd so on.\n"
    other = Found(**{**vars(ROW), "plain": None})
    new = with_rows(page, {first: other, second: ROW})
    expected = table({first: other, second: ROW, third: ROW})
    assert new == f"# Title\n\n{expected}\n\nAnd so on.\n"
    with pytest.raises(ValueError, match="no table"):
        with_rows("# Title\n", {first: ROW})


def test_the_recipe_has_every_library():
    text = RECIPE.read_text()
    assert all(f"| {case.name} |" in text for case in CASES)
    assert with_rows(text, {}) == text
