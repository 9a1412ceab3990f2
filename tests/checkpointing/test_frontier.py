"""Frontiers: sequences of plans that no plan beats, not even one of a `Budget`."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing import Frontier

from ..marks import slow

CELL = eqx.nn.LSTMCell(8, 32, key=jax.random.key(1))
H = jnp.zeros(32), jnp.zeros(32)


def lstm(carry, x):
    return CELL(x, carry), None


def beaten(by, plans):
    is_less = lambda one: by.relative_time < 0.9 * one.relative_time
    return [one for one in plans if by.peak_bytes <= one.peak_bytes and is_less(one)]


@pytest.mark.slow
def test_the_plan_of_the_loop_itself_beats_none():
    # All at once is slower here, and larger, than many other plans.
    scan = el.Scan(lstm, schedule=el.Chunked(40, batch=8))
    frontier = scan.frontier(H, jnp.ones((40, 8)))
    assert beaten(frontier.chosen, frontier) == []


def test_little_memory_does_not_take_much_time():
    """More than XLA is thought to need at the least, and less than a weight."""
    plan = el.Scan(lstm, schedule=el.Budget(12_819, measure=False))
    plan = plan.plan(H, jnp.ones((300, 8)))
    assert plan.peak_bytes <= 12_819
    assert plan.evaluations < 1000


@pytest.mark.parametrize("length", [slow(300), slow(2000)])
def test_no_budget_finds_a_plan_that_beats_it(length):
    xs = jnp.ones((length, 8))
    frontier = el.Scan(lstm).frontier(H, xs)
    sizes = [plan.peak_bytes for plan in frontier]
    for size in sizes[:: max(len(sizes) // 6, 1)]:
        found = el.Scan(lstm, schedule=el.Budget(size)).plan(H, xs)
        assert beaten(found, frontier) == []


def test_a_long_one_is_printed_in_part():
    scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=el.Binomial(2))
    plan = scan.plan(jnp.zeros(3), jnp.zeros((32, 3)))
    sizes = [(1000 + 10 * i, 100 / (1 + i)) for i in range(200)]
    plans = [
        dataclasses.replace(plan, peak_bytes=size, relative_time=time)
        for size, time in sizes
    ]
    _, *rows, more, now, _ = str(Frontier(tuple(plans), plan)).splitlines()
    assert 20 <= len(rows) <= 25
    assert (rows[0].split()[0], rows[-1].split()[0]) == ("0.977", "2.92")
    assert more.startswith(f"and {200 - len(rows)} between these")
    assert now.startswith("now, by Binomial")


def test_printed_it_is_a_table():
    def plan(schedule):
        scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=schedule)
        return scan.plan(jnp.zeros(3), jnp.zeros((32, 3)))

    plans = plan(el.Binomial(2)), plan(el.StoreAll())
    frontier = Frontier(plans, plan(el.Chunked(4)))
    head, *rows, now, chosen = str(frontier).splitlines()
    assert head.split() == ["memory", "time", "evaluations", "stored"]
    assert len(rows) == len(frontier)
    assert now == "now, by Chunked(chunk_size=4, batch=1):"
    assert f"{frontier.chosen.evaluations} " in chosen
    assert len({row.index(" x ") for row in (*rows, chosen)}) == 1


@pytest.mark.slow
def test_stacked_layers_have_one():
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    layers = el.StackedLayers.from_layers([linear] * 8, schedule=el.Chunked(2))
    frontier = layers.frontier(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert frontier.chosen.schedule == el.Chunked(2)
    assert frontier.chosen.pinned == layers.plan(jnp.ones(3)).pinned
