"""What was decided is remembered with the program, and not searched for again."""

import jax
import pytest

import eqloop as el
from eqloop.checkpointing import recall
from eqloop.fitting import _choice, _decision
from eqloop.fitting._options import Way
from eqloop.fitting._remembered import as_text, from_text

from ..asserts import assert_close
from .functions import TIGHT, W, X, layers, mixed
from .test_whiles import until


@pytest.fixture
def forget(tmp_path):
    """Goes on as another process would, which reads the same file."""

    def forget():
        _decision.decided.cache_clear()
        _decision.recalled.cache_clear()
        el.measurements(tmp_path / "facts.json")

    forget()
    yield forget
    _decision.decided.cache_clear()
    _decision.recalled.cache_clear()
    el.measurements(None)


@pytest.mark.parametrize("f", [layers, mixed, until])
def test_a_second_process_plans_nothing(f, forget, monkeypatch):
    budget = 3 * TIGHT // 2 if f is until else TIGHT
    args = (W, X) if f is not until else (jax.numpy.eye(16), jax.numpy.ones((8, 16)))
    fit = el.Fit(f, budget)
    gradient, plan = jax.jit(jax.grad(fit))(*args), fit.plan(*args)
    forget()

    def searched(*args, **kwargs):
        raise AssertionError("it is planned again")

    for name in ("within", "smallest"):
        monkeypatch.setattr(_choice.Choice, name, searched)
    monkeypatch.setattr(_decision, "temporary_bytes", searched)
    again = el.Fit(f, budget)
    assert_close(jax.jit(jax.grad(again))(*args), gradient)
    assert str(again.plan(*args)) == str(plan)
    # Of another budget, or another function, nothing is known.
    for other in (el.Fit(f, budget + 64), el.Fit(lambda *x: 2 * f(*x), budget)):
        with pytest.raises(AssertionError, match="planned again"):
            jax.grad(other)(*args)


def test_a_plan_that_does_not_fit_any_more_is_made_anew(forget, monkeypatch):
    fit = el.Fit(layers, TIGHT)
    before = fit.plan(W, X)
    forget()

    def more(key):
        """As if the compiler told more of what was decided."""
        known = recall(key)
        is_of_plan = known is not None and known.get("bytes") == before.peak_bytes
        return {"bytes": 2.0 * TIGHT} if is_of_plan else known

    monkeypatch.setattr(_decision, "recall", more)
    plan = fit.plan(W, X)
    assert plan.peak_bytes <= TIGHT
    assert str(plan) != str(before)


def test_nothing_but_what_was_written_is_made_of_text():
    ways = (Way("everything"), Way("in 2 parts of 3 rows", rows=3))
    assert from_text(as_text(ways)) == ways
    assert as_text((Way("x", policy=lambda *_: True),)) is None
    for wrong in (
        "no json",
        "[3]",
        '[{"class": "os:system"}]',
        '[{"class": "eqloop:Fit"}]',
        '[{"name": "builtins:eval"}]',
    ):
        assert from_text(wrong) is None
