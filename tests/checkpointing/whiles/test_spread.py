"""Which carries are stored online, and how many evaluations that comes to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop.checkpointing.engine.orders._binomial import sweep_advances
from eqloop.checkpointing.whiles._spread import Spreading, full, move_on
from eqloop.checkpointing.whiles._until_stop import UNLIMITED

from ...marks import slow_if
from .models import Ours, Theirs


def lengths(model, length):
    """The advances of the reverse sweep after 1, 2, ... steps."""
    for position in range(length):
        model.pass_step(position)
        yield model.advances(position + 1)


@functools.cache
def starts(slots, length, max_steps=UNLIMITED):
    """What the engine has stored before each step, once the slots are full."""
    rule = Spreading(slots, max_steps)

    def look(spread, position):
        _, moved = move_on(rule, spread, position)
        is_due = position == spread.stop
        spread = jax.tree.map(functools.partial(jnp.where, is_due), moved, spread)
        return spread, (spread.starts, spread.rows)

    positions = jnp.arange(slots, length, dtype=jnp.int32)
    return jax.jit(lambda: jax.lax.scan(look, full(slots), positions)[1])()


@pytest.mark.parametrize(
    "slots", slow_if((4, 5, 6, 7, 8, 9, 10, 11).__contains__, range(2, 13))
)
def test_engine_stores_what_the_model_says(slots):
    model = Ours(slots)
    all_starts, all_rows = starts(slots, 200)
    for position in range(200):
        model.pass_step(position)
        if position >= slots:
            assert all_starts[position - slots].tolist() == model.starts
            *rows, beyond = all_rows[position - slots].tolist()
            assert (sorted(rows), beyond) == (list(range(slots)), slots)


def test_a_bound_on_the_steps_changes_nothing_below_it():
    for bounded, unbounded in zip(starts(4, 150, 150), starts(4, 150), strict=True):
        np.testing.assert_array_equal(bounded, unbounded)


@pytest.mark.parametrize("slots", range(1, 13))
def test_never_more_evaluations_than_equinox(slots):
    ours, theirs = lengths(Ours(slots), 200), lengths(Theirs(slots), 200)
    for one, other in zip(ours, theirs, strict=True):
        assert one <= other


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 3, 5, 8, 13, 20, 30])
def test_never_more_evaluations_than_equinox_in_longer_loops(slots):
    ours, theirs = lengths(Ours(slots), 1200), lengths(Theirs(slots), 1200)
    for one, other in zip(ours, theirs, strict=True):
        assert one <= other


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 12])
def test_optimal_as_long_as_each_step_is_run_again_at_most_once(slots):
    length = slots * (slots + 3) // 2
    least = [sweep_advances(n, slots) for n in range(1, length + 1)]
    assert list(lengths(Ours(slots), length)) == least


def test_nearly_optimal_beyond():
    excess = [
        (2 * n + advances) / (2 * n + sweep_advances(n, slots)) - 1
        for slots in range(2, 13)
        for n, advances in enumerate(lengths(Ours(slots), 200), 1)
    ]
    assert np.mean(excess) < 0.01
    assert max(excess) < 0.1


def test_ranks_reach_as_far_as_a_counter():
    for slots in (4, 10, 100):
        assert Spreading(slots, UNLIMITED).reach[slots][-1] == UNLIMITED
    # With fewer slots they reach as far as anyone has the patience for.
    assert Spreading(2, UNLIMITED).reach[2][-1] > 10**6
