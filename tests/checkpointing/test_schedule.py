"""Schedules: their settings, and the layouts that follow from them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

COUNTS = [
    (lambda n: el.Recursive(n), "base", 2),
    (lambda n: el.Chunked(n), "chunk_size", 1),
    (lambda n: el.Binomial(n), "checkpoints", 1),
    (lambda n: el.Binomial(2, block=n), "block", 1),
]


def scan(schedule, policy=None):
    step = lambda h, x: (jnp.sin(h) + x, h)
    return el.Scan(step, schedule=schedule, policy=policy)


def plan(schedule, length, policy=None):
    return scan(schedule, policy).plan(jnp.zeros(3), jnp.zeros((length, 3)))


@pytest.mark.parametrize(("make", "name", "least"), COUNTS)
def test_counts_are_checked(make, name, least):
    owner = type(make(3)).__name__
    for value in (least - 1, 0, -3):
        with pytest.raises(ValueError, match=f"{owner}: `{name}` must be at least"):
            make(value)
    for value in (True, 2.0, "8", None):
        with pytest.raises(TypeError, match=f"{owner}: `{name}` must be an int, not"):
            make(value)
    assert make(np.int32(4)) == make(4)
    assert hash(make(np.int32(4))) == hash(make(4))
    assert repr(make(np.int32(4))) == repr(make(4))


def test_schedules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        el.Binomial(3).checkpoints = 4


@pytest.mark.parametrize("policy", [None, el.policies.save_dots])
def test_a_block_may_be_longer_than_the_loop(policy):
    found = plan(el.Binomial(2, block=11), 7, policy)
    assert (found.slots, found.block) == (1, 7)
    assert found.evaluations == 14


@pytest.mark.parametrize("policy", [None, el.policies.save_dots])
def test_a_chunk_may_be_longer_than_the_loop(policy):
    found = plan(el.Chunked(100), 7, policy)
    assert found.slots == (7 if policy is None else 1)
    assert found.evaluations == 14


@pytest.mark.parametrize(
    "schedule",
    [el.StoreAll(), el.Recursive(), el.Chunked(4), el.Binomial(3, block=5)],
)
def test_no_steps(schedule):
    found = plan(schedule, 0)
    assert (found.length, found.slots, found.evaluations) == (0, 0, 0)
    assert str(found)


@pytest.mark.parametrize("length", [1, 7, 100, 1000, 1023])
def test_recursive_needs_a_logarithm_of_slots(length):
    found = plan(el.Recursive(4), length)
    depth = max(np.log(length) / np.log(4), 1)
    assert found.slots <= 4 * depth + 4
    assert found.evaluations <= (2 + depth) * length
    assert found.block == 1


def test_with_a_policy_residuals_are_stored_in_blocks():
    policy = el.policies.save_dots
    assert plan(el.Recursive(4), 64, policy).block == 4
    assert plan(el.Chunked(8), 64, policy).block == 8
