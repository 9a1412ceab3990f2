"""`Fit.frontier`: what a function takes, in memory and in time, whatever the budget."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import AS_USED, temp_bytes
from ..marks import slow
from ..weights import normal
from .functions import W, X, layers, mixed

gradient = lambda f: jax.value_and_grad(f, (0, 1))


@pytest.mark.parametrize("f", [slow(layers), mixed])
def test_plans_trade_memory_for_time_and_say_what_they_take(f):
    frontier = el.Fit(f, 1).frontier(W, X)
    assert 2 <= len(frontier) <= 10
    assert frontier.chosen is None
    for one, other in itertools.pairwise(frontier):
        assert one.peak_bytes <= other.peak_bytes
        assert one.relative_time > other.relative_time
    assert frontier[-1].relative_time == 1.0
    value, expected = gradient(f)(W, X)
    # On JAX 0.10 it once took 3,560 bytes where 3,296 were planned, after other tests
    # in the same process, and 1,256 where 1,248 were; neither was seen again.
    few = 64 if jax.__version_info__ >= (0, 11) else 512
    for plan in (frontier[0], frontier[len(frontier) // 2]):
        taken = temp_bytes(gradient(plan.pinned), W, X)
        assert abs(taken - plan.peak_bytes) <= few
        run = jax.jit(gradient(plan.pinned)).lower(W, X).compile(AS_USED)
        found, actual = run(W, X)
        np.testing.assert_allclose(found, value, 1e-4)
        assert_close(actual, expected, 1e-3, 1e-4)


def test_the_fastest_within_the_budget_is_chosen():
    frontier = el.Fit(layers, 1, split=False).frontier(W, X)
    # What is hardly faster is not tried.
    pairs = itertools.pairwise(frontier)
    much_faster = lambda one, two: two.relative_time < 0.95 * one.relative_time
    middle = next(two for one, two in pairs if much_faster(one, two))
    besides = 2 * (W.nbytes + X.nbytes) + 4
    for limits in (
        {"budget": middle.peak_bytes},
        {"total": middle.peak_bytes + besides},
    ):
        found = el.Fit(layers, split=False, **limits).frontier(W, X)
        assert found.budget == middle.peak_bytes
        assert found.chosen.peak_bytes == middle.peak_bytes
        marked = str(found).splitlines()[1 + found.plans.index(found.chosen)]
        assert marked.endswith("the fastest within the budget")
    axes = found.plot()
    assert axes.lines[1].get_xdata() == [middle.peak_bytes]
    assert len(frontier.plot().lines) == 1


def test_the_chosen_one_is_the_plan():
    for budget in (9000, 10_500, 12_000):
        fit = el.Fit(mixed, budget)
        plan, chosen = fit.plan(W, X), fit.frontier(W, X).chosen
        assert (plan.peak_bytes, str(plan)) == (chosen.peak_bytes, str(chosen))


def head(w, h, labels):
    for _ in range(2):
        h = jnp.tanh(h @ w[:, :16]) + h
        h = jax.nn.softmax(h @ h.T) @ h
    logits = h @ w
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, 1) - picked)


def test_plans_of_rows_and_of_none_are_pinned_and_say_what_they_take():
    args = normal(0, (16, 500)), normal(1, (200, 16)), jnp.arange(200)
    frontier = el.Fit(head, "1GiB").frontier(*args)
    by_rows = [any(" parts of " in p.stores for p in plan.parts) for plan in frontier]
    assert any(by_rows)
    assert not all(by_rows)
    expected = jax.grad(head)(*args)
    for plan in frontier:
        again = plan.pinned.plan(*args)
        assert again.peak_bytes == plan.peak_bytes
        assert [p.stores for p in again.parts] == [p.stores for p in plan.parts]
    for plan in (frontier[0], frontier[-1]):
        assert_close(jax.jit(jax.grad(plan.pinned))(*args), expected, 1e-3, 1e-5)


def test_a_fit_of_a_gradient_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r"put `Fit` inside, `jax.grad\(el.Fit\(f, …"):
        el.Fit(jax.grad(layers, (0, 1)), 1).plan(W, X)


def test_a_call_of_a_fit_of_a_gradient_is_told_as_well():
    inside, outside = jax.grad(el.Fit(layers, "1GiB")), el.Fit(jax.grad(layers), "1GiB")
    with pytest.warns(UserWarning, match=r"put `Fit` inside: `jax.grad\(el.Fit\(f, …"):
        assert_close(outside(W, X), inside(W, X), 1e-5, 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice = lambda w: jnp.sum(jax.grad(layers)(w, X) ** 2)
        jax.jit(jax.grad(el.Fit(twice, "1GiB")))(W)


def test_a_least_budget_that_it_shows_fits():
    least = el.Fit(layers, 1).frontier(W, X)[0].peak_bytes
    assert el.Fit(layers, least).plan(W, X).peak_bytes <= least
