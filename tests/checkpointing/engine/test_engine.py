"""Evaluations of the step, counted while the loop runs, for every schedule."""

import collections
import itertools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el
from eqloop.checkpointing.engine.orders import _binomial
from eqloop.checkpointing.engine.orders._levels import nests
from eqloop.checkpointing.engine.orders._nested import Nested

from ...marks import slow, slow_if
from ..counting import Counter, count_gradient, final

pytestmark = pytest.mark.sampled

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(3),
    el.Chunked(5),
    el.Chunked(5, batch=5),
    el.Recursive(3, batch=2),
    el.Binomial(1),
    el.Binomial(4),
    el.Binomial(99),
    el.Binomial(3, block=4),
)
# They are like others, with other numbers.
MORE = (el.Chunked(5), el.Recursive(3, batch=2), el.Binomial(1), el.Binomial(99))


def least(length: int, slots: int) -> int:
    return 2 * length + _binomial.sweep_advances(length, slots)


@pytest.mark.parametrize(
    ("length", "slots"),
    [
        pytest.param(10_000, 60, marks=pytest.mark.slow),
        slow(1_000, 3),
        (97, 3),
        slow(97, 1000),
        (50, 1),
        (1, 1),
    ],
)
def test_binomial_takes_the_least_evaluations(length, slots):
    assert len(count_gradient(el.Binomial(slots), length)) == least(length, slots)


@hypothesis.given(st.integers(1, 120), st.integers(1, 12), st.sampled_from([1, 1, 3]))
@hypothesis.settings(max_examples=3)
def test_binomial_takes_the_least_evaluations_unrolled_or_not(length, slots, unroll):
    places = count_gradient(el.Binomial(slots), length, unroll=unroll)
    assert len(places) == least(length, slots)


@pytest.mark.slow
@pytest.mark.parametrize("slots", range(1, 13))
def test_binomial_takes_the_least_evaluations_for_every_length(slots):
    for length in range(1, 121):
        places = count_gradient(el.Binomial(slots), length)
        assert len(places) == least(length, slots), length


@pytest.mark.parametrize("length", [1, 100])
@pytest.mark.parametrize("base", [2, 16])
def test_recursive_evaluates_what_its_order_says(length, base):
    order = Nested(nests(length, base))
    assert len(count_gradient(el.Recursive(base), length)) == order.evaluations


def test_chunks_evaluate_each_step_thrice_but_their_last():
    places = collections.Counter(count_gradient(el.Chunked(5), 23))
    # What makes no whole chunk has a slot for every step.
    twice = {4, 9, 14, 19, 20, 21, 22}
    assert places == {i: 2 if i in twice else 3 for i in range(23)}


def test_stored_residuals_are_not_computed_again():
    assert sorted(count_gradient(el.StoreAll(), 23)) == list(range(23))
    # A chain of a single block: its start is stored, so it is run once more.
    assert len(count_gradient(el.Binomial(3, block=23), 23)) == 2 * 23


def test_a_block_of_steps_is_advanced_over_as_a_whole():
    places = count_gradient(el.Binomial(3, block=4), 10)
    # Blocks of 2, 4 and 4 steps with a slot each: nothing but primal and reversal.
    assert collections.Counter(places) == dict.fromkeys(range(10), 2)


@pytest.mark.parametrize("schedule", slow_if(MORE.__contains__, SCHEDULES), ids=str)
@pytest.mark.parametrize("length", [0, slow(4), 13])
def test_the_primal_evaluates_each_step_once(schedule, length):
    step = Counter()
    run = final(step, schedule, length)
    args = (0.5, jnp.ones(length))
    once = list(range(length))
    assert sorted(step.evaluations(run, *args)) == once
    push = lambda h, xs: jax.jvp(run, (h, xs), (1.0, xs))
    assert sorted(step.evaluations(push, *args)) == once
    batched = jax.vmap(run, (None, 1))
    xs = jnp.ones((length, 2))
    assert sorted(step.evaluations(batched, 0.5, xs)) == once


# One of each order, and of those that have blocks.
@pytest.mark.parametrize("schedule", slow_if(MORE.__contains__, SCHEDULES[1:]), ids=str)
def test_value_and_gradient_share_their_primal(schedule):
    """The places come in order: first those of the primal, each once."""
    step = Counter(ordered=True)
    run = final(step, schedule, 13)
    places = step.evaluations(lambda h: jax.value_and_grad(run)(h, jnp.ones(13)), 0.5)
    assert places[:13] == list(range(13))
    counts = collections.Counter(places[13:])
    assert set(counts) == set(range(13))
    # The reversal takes the steps last to first.
    firsts = [max(i for i, p in enumerate(places) if p == place) for place in range(13)]
    if getattr(schedule, "block", 1) == 1:
        assert all(a > b for a, b in itertools.pairwise(firsts))


def test_nothing_is_run_again_for_a_derivative_in_forward_mode():
    step = Counter()
    run = final(step, el.Binomial(4), 13)
    directions = jnp.eye(13)[:3]

    def jacobian(h: Any, xs: Any) -> Any:
        _, push = jax.linearize(lambda xs: run(h, xs), xs)
        return jax.vmap(push)(directions)

    places = collections.Counter(step.evaluations(jacobian, 0.5, jnp.ones(13)))
    assert set(places) == set(range(13))
    assert max(places.values()) <= 2


def test_what_is_not_asked_for_is_not_computed():
    step = Counter()
    run = final(step, el.Binomial(4), 13)
    unused = lambda h, xs: jax.vjp(run, h, xs)[0]
    assert sorted(step.evaluations(unused, 0.5, jnp.ones(13))) == list(range(13))


@pytest.mark.parametrize("slots", [slow(7), 8, 9, slow(17)])
def test_many_slots(slots):
    """The row of a slot is found by bisection, among a power of two of them."""
    xs = jnp.sin(jnp.arange(40.0))

    def final(loop: Any) -> Any:
        step = lambda h, x: (jnp.sin(h + x), h * x)
        return lambda h: jnp.sum(loop(step, h)[1]) + loop(step, h)[0]

    ours = lambda step, h: el.Scan(step, schedule=el.Binomial(slots))(h, xs)
    theirs = lambda step, h: jax.lax.scan(step, h, xs)
    actual, expected = (jax.grad(final(loop))(0.3) for loop in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
