"""What was decided is remembered with the program, and not searched for again."""

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing import recall
from eqloop.fitting import _decision, _whole
from eqloop.fitting._options import Way
from eqloop.fitting._remembered import as_text, from_text

from ..asserts import assert_close
from .functions import TIGHT, W, X, layers, mixed


def until(w, x):
    step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
    loop = el.CheckpointedWhileLoop(lambda c: c[0] < 50, step, max_steps=100)
    return jnp.sum(loop((0, x))[1] ** 2)


def fused(w, x):
    x = jnp.resize(x, (1500, 3))
    pairs = jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1))
    return jnp.sum(pairs) + jnp.sum(w**2)


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


def by_rows(w, x):
    return jnp.sum(jax.vmap(lambda x: layers(w, x[None]))(x))


@pytest.mark.sampled
@pytest.mark.parametrize("f", [layers, mixed, until, fused, by_rows])
def test_a_second_process_plans_nothing(f, forget, monkeypatch):
    nbytes = {fused: 100_000, by_rows: 4000}.get(f, TIGHT)
    fit = el.Fit(f, nbytes)
    gradient, plan = jax.jit(jax.grad(fit))(W, X), fit.plan(W, X)
    forget()

    def searched(*args, **kwargs):
        raise AssertionError("it is planned again")

    for name in ("_simplest", "_that_fit"):
        monkeypatch.setattr(_decision, name, searched)
    monkeypatch.setattr(_whole, "temporary_bytes", searched)
    again = el.Fit(f, nbytes)
    assert_close(jax.jit(jax.grad(again))(W, X), gradient)
    assert str(again.plan(W, X)) == str(plan)
    # Of another budget, or another function, nothing is known; but what fits as it is
    # does so with more, too.
    more = [el.Fit(f, nbytes + 64)] if f is not fused else []
    for other in (*more, el.Fit(lambda *x: 2 * f(*x), nbytes)):
        with pytest.raises(AssertionError, match="planned again"):
            jax.grad(other)(W, X)


def test_a_plan_that_does_not_fit_any_more_is_made_anew(forget, monkeypatch):
    fit = el.Fit(layers, TIGHT)
    before = fit.plan(W, X)
    forget()

    def more(key):
        """As if the compiler told more of what was decided."""
        known = recall(key)
        is_of_plan = known is not None and known.get("bytes") == before.peak_bytes
        return {"bytes": 2.0 * TIGHT} if is_of_plan else known

    monkeypatch.setattr(_whole, "recall", more)
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
