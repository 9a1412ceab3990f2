"""Schedules: their settings, and the layouts that follow from them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow_if

pytestmark = pytest.mark.sampled

COUNTS = [
    (lambda n: el.Recursive(n), "base", 2),
    (lambda n: el.Chunked(n), "chunk_size", 1),
    (lambda n: el.Binomial(n), "checkpoints", 1),
    (lambda n: el.Binomial(2, block=n), "block", 1),
    (lambda n: el.Chunked(2, batch=n), "batch", 1),
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


def test_a_batch_is_no_block():
    for schedule in (el.Recursive, el.Chunked):
        assert schedule(4, batch=np.int32(2)).batch == 2
        with pytest.raises(TypeError, match="unexpected keyword argument 'block'"):
            schedule(4, block=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batch'"):
        el.Binomial(4, batch=2)
    with pytest.raises(ValueError, match="Recursive: `batch` must be at least 1"):
        el.Recursive(4, batch=0)


def test_schedules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        el.Binomial(3).checkpoints = 4


@pytest.mark.parametrize("policy", [None, el.policies.save_dots])
def test_a_block_may_be_longer_than_the_loop(policy):
    found = plan(el.Binomial(2, block=11), 7, policy)
    assert (found.slots, found.block) == (1, 7)
    assert found.evaluations == (14 if policy is None else 21)


@pytest.mark.parametrize("policy", [None, el.policies.save_dots])
def test_a_chunk_may_be_longer_than_the_loop(policy):
    found = plan(el.Chunked(100), 7, policy)
    assert found.slots == (7 if policy is None else 1)
    assert found.evaluations == (14 if policy is None else 21)


@pytest.mark.parametrize(
    "schedule",
    [
        el.StoreAll(),
        el.Recursive(),
        el.Chunked(4),
        el.Binomial(3, block=5),
        el.StoreLast(el.Recursive(), 3),
    ],
)
def test_no_steps(schedule):
    found = plan(schedule, 0)
    assert (found.length, found.slots, found.evaluations) == (0, 0, 0)
    assert str(found)


ANY_LENGTH = [
    el.Recursive(2),
    el.Recursive(5),
    el.Chunked(3),
    el.Chunked(30),
    el.Binomial(1),
    el.Binomial(30),
    el.Binomial(2, block=3),
    el.Binomial(3, block=25),
    el.Budget(4000),
    el.StoreLast(el.Chunked(3), 4),
    el.Offload(el.Binomial(3, block=7)),
    el.Offload(el.Budget(4000)),
]


@pytest.mark.parametrize(
    "length", slow_if(lambda length: length not in (0, 2), range(21))
)
@pytest.mark.parametrize("policy", [None, el.policies.save_dots])
def test_every_schedule_runs_every_length(length, policy):
    h, xs = jnp.ones(3), jnp.linspace(0.5, 1, length * 3).reshape(length, 3)

    def gradient(schedule):
        def loss(h, xs):
            carry, ys = scan(schedule, policy)(h, xs)
            return jnp.sum(carry**2) + jnp.sum(ys)

        return jax.grad(loss, (0, 1))(h, xs)

    # All in one program: it is compiled once.
    every = jax.jit(lambda: list(map(gradient, [el.StoreAll(), *ANY_LENGTH])))()
    for found in every[1:]:
        for a, b in zip(found, every[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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


# How long a gradient compiles goes by the copies of the step: how often the program has
# it, and how often it has its derivative. One more of each is for a remainder.
COPIES = [
    (el.StoreAll(), 1024, (1, 1)),
    (el.Recursive(16), 256, (2, 1)),
    (el.Recursive(16), 1000, (3, 1)),
    (el.Chunked(16), 1024, (2, 1)),
    (el.Chunked(16), 1000, (3, 2)),
    (el.Binomial(10), 1000, (3, 1)),
    (el.Binomial(10, block=4), 1000, (4, 1)),
]


@pytest.mark.parametrize("is_batch", [False, True])
@pytest.mark.parametrize(("schedule", "length", "copies"), COPIES)
def test_copies_of_the_step_in_a_gradient(schedule, length, copies, is_batch):
    step = lambda h, x: (jnp.sin(h + x), None)
    loss = lambda h, xs: jnp.sum(el.Scan(step, schedule=schedule)(h, xs)[0])
    run = jax.vmap(loss) if is_batch else loss
    rows = (3,) * is_batch
    h, xs = jnp.ones((*rows, 4)), jnp.ones((*rows, length, 4))
    gradient = jax.jit(jax.grad(lambda h, xs: jnp.sum(run(h, xs)), (0, 1)))
    text = gradient.lower(h, xs).as_text()
    assert (text.count("stablehlo.sine "), text.count("stablehlo.cosine ")) == copies
