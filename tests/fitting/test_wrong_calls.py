"""What is wrong about a call of `Fit`, where, and what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises
from .functions import TIGHT, W, X, layers, mixed, over_time

CALLS = {
    "no function": (
        lambda: el.Fit(3, TIGHT),
        "TypeError: Fit: `f` must be callable … 3",
    ),
    "no budget": (
        lambda: el.Fit(layers),
        "ValueError: Fit: pass either a `budget` … or a `total`",
    ),
    "two budgets": (
        lambda: el.Fit(layers, 1, total=2),
        "ValueError: Fit: pass either a `budget` … or a `total`",
    ),
    "no amount": (
        lambda: el.Fit(layers, "3 apples"),
        "ValueError: Fit: … '3 apples' … '1.5GiB'",
    ),
    "a fraction": (
        lambda: el.Fit(layers, 0.5),
        "TypeError: Fit: … 0.5",
    ),
    "no bytes": (
        lambda: el.Fit(layers, total=0),
        "ValueError: Fit: … at least 1 byte … 0",
    ),
    "no amount on the host": (
        lambda: el.Fit(layers, TIGHT, host="much"),
        "ValueError: Fit: `host='much'` … '1.5GiB'",
    ),
    "a schedule": (
        lambda: el.Fit(layers, el.Budget(TIGHT)),
        "TypeError: Fit: … Budget",
    ),
    "foreign is no bool": (
        lambda: el.Fit(layers, TIGHT, foreign="yes"),
        "TypeError: Fit: `foreign` … 'yes'",
    ),
    "no device": (
        lambda: el.Fit(layers, TIGHT, device="h1000").plan(W, X),
        "ValueError: … h1000",
    ),
    "code that does not fit": (
        lambda: el.Fit(layers, 1000).plan(W, X),
        "ValueError: Fit: … 1 KB … at least … which is … bytes … functions.py … "
        "(layers) … smaller",
    ),
    "a loop that does not fit": (
        lambda: jax.grad(el.Fit(over_time, 800))(W, X),
        "ValueError: Fit: … 800 B … at least … the loop … functions.py … (over_time)",
    ),
    "a total that does not fit": (
        lambda: el.Fit(layers, total=1000).plan(W, X),
        "ValueError: Fit: … 1 KB. … inputs and outputs included, at least",
    ),
    "another function than planned": (
        lambda: jax.grad(el.Fit(mixed, TIGHT, ways=()))(W, X),
        "ValueError: Fit: this plan is for another function … 0 parts … `plan`",
    ),
}


@pytest.mark.parametrize(("call", "said"), CALLS.values(), ids=CALLS)
def test_what_is_said(call: Any, said: str):
    assert_raises(call, said)


def test_an_error_in_the_function_is_its_own():
    def f(x: Any) -> Any:
        return x @ jnp.ones(3)

    with pytest.raises(TypeError, match="dot_general"):
        el.Fit(f, TIGHT)(X)


def test_without_a_gradient_nothing_has_to_fit():
    assert el.Fit(layers, 1)(W, X) == layers(W, X)
    jax.jvp(el.Fit(layers, 1), (W, X), (W, X))
