"""A few of the functions and budgets; `python -m tests.fits` shows all of them."""

import json

import jax
import pytest

import eqloop as el

from ..asserts import assert_close
from ..benchmarks._measure import temp_bytes
from ..marks import slow
from . import _page
from ._functions import NAMES, Function, function
from ._measure import least_budget


def _compiled(function: Function, loss):
    return jax.jit(jax.value_and_grad(loss)).lower(*function.args).compile()


def _check(of: Function, parts: list[float]) -> None:
    """Budgets are kept, also the least, and what is computed is the same."""
    plain = _compiled(of, of.plain)
    whole, least = temp_bytes(plain), least_budget(of)
    value, gradient = plain(*of.args)
    for part in parts:
        budget = round(least + part * max(whole - least, 0))
        made = _compiled(of, el.Fit(of.plain, budget))
        assert temp_bytes(made) <= budget
        found, other = made(*of.args)
        assert_close(found, value, rtol=1e-6)
        assert_close(other, gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [slow("mixer"), "recurrent"])
def test_a_small_function_keeps_its_budget(name):
    _check(function(name, 0.03), [0.0])


@pytest.mark.parametrize("name", [*map(slow, NAMES)])
def test_functions_keep_their_budgets(name):
    if name == "neural-ode":
        pytest.importorskip("diffrax")
    _check(function(name, 0.2), [0.0, 0.5, 1.0])


def test_the_guide_has_the_figures_that_were_found():
    text = _page.PAGE.read_text()
    assert _page.page(text, json.loads(_page.DATA.read_text())) == text
