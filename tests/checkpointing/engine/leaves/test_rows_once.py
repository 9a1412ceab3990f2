"""Which buffers are known to have each row written once."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqloop.checkpointing.steps._loop import Loop
from eqloop.checkpointing.steps._rows_once import RowsOnce, rows_once
from eqloop.checkpointing.steps._step import trace_step

STEPS, WIDTH = 7, 4


def rows_of(f, loop, *carry):
    """What is known of the last leaf of the carry of a step."""
    types = list(map(jax.typeof, carry))
    step, _ = trace_step(lambda carry, _: (f(*carry), []), types, [])
    return rows_once(step, loop)[-1]


def by_one(write):
    return lambda i, rows: [i + 1, write(rows, jnp.ones(rows.shape[1:]), i)]


def loop(start=None, steps=STEPS):
    return Loop(steps, starts=(start, None))


def buffer(rows):
    return jnp.zeros((rows, WIDTH))


ZERO = jnp.zeros((), jnp.int32)


def by_hand(rows, h, i):
    """Rows added to zeros, as transposes write them."""
    index = i, jnp.zeros_like(i)
    zeros = jnp.zeros_like(rows)
    old = lax.dynamic_update_slice(rows, jnp.zeros_like(h)[None], index)
    return lax.add(old, lax.dynamic_update_slice(zeros, h[None], index))


def no_index(rows, h, i):
    """A scatter of an index that is not moved when it is negative."""
    numbers = lax.ScatterDimensionNumbers((0,), (0,), (0,))
    return lax.scatter(rows, i[None], h, numbers)


def repeated(rows, h, i):
    """A scatter of which one index is for two axes."""
    numbers = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    return lax.scatter(rows, lax.broadcast(i, (2,)), h[0], numbers)


# Writes that are dropped where they are out of bounds, and how far behind the counter.
DROPPED = {
    "set": (lambda rows, h, i: rows.at[i].set(h), 0),
    "behind": (lambda rows, h, i: rows.at[3 + i - 1].add(h), 2),
    "kept": (lambda rows, h, i: jnp.where(h[0] > 0, rows.at[i].set(h), rows), 0),
    "part": (lambda rows, h, i: rows.at[i, 2].set(1.0), 0),
    "scatter": (no_index, 0),
}
CLAMPED = {
    "dynamic": lambda rows, h, i: lax.dynamic_update_index_in_dim(rows, h, i, 0),
    "clip": lambda rows, h, i: rows.at[i].set(h, mode="clip"),
    "by hand": by_hand,
}
OTHERS = {
    "twice": lambda rows, h, i: rows.at[i].set(h).at[i + 1].set(h),
    "ring": lambda rows, h, i: rows.at[i % 3].set(h),
    "same": lambda rows, h, i: rows.at[2].set(h),
    "two": lambda rows, h, i: lax.dynamic_update_slice_in_dim(
        rows, jnp.stack([h, h]), i, 0
    ),
    "moved": lambda rows, h, i: jnp.roll(rows, 1, 0).at[i].set(h),
    "scaled": lambda rows, h, i: rows.at[2 * i].set(h),
    "several": lambda rows, h, i: rows.at[i + jnp.arange(2)].set(h[None]),
    "repeated": repeated,
    "unread": lambda rows, h, i: rows,
    # With 32 bits it is row `i - 2`.
    "wrapped": lambda rows, h, i: no_index(rows, h, i + (2**31 - 1) + (2**31 - 1)),
}


@pytest.mark.parametrize("name", DROPPED)
def test_writes_that_are_dropped_out_of_bounds(name):
    write, offset = DROPPED[name]
    f, found = by_one(write), RowsOnce(0, 0, offset)
    # Wherever the counter starts, it does not come round.
    assert rows_of(f, loop(), ZERO, buffer(STEPS)) == found
    assert rows_of(f, loop(-5), ZERO, buffer(STEPS)) == found
    assert rows_of(f, loop(), ZERO, buffer(STEPS - 1)) is None
    # With fewer rows than steps it must be known not to start below zero.
    assert rows_of(f, loop(1), ZERO, buffer(3)) == found
    assert rows_of(f, loop(1, 2**31 - 1), ZERO, buffer(3)) == found
    assert rows_of(f, loop(-3), ZERO, buffer(3)) is None


@pytest.mark.parametrize("name", CLAMPED)
def test_writes_that_are_clamped(name):
    f = by_one(CLAMPED[name])
    assert rows_of(f, loop(2), ZERO, buffer(STEPS + 2)) == RowsOnce(0, 0, 0)
    assert rows_of(f, loop(2), ZERO, buffer(STEPS + 1)) is None
    assert rows_of(f, loop(-1), ZERO, buffer(STEPS + 1)) is None
    assert rows_of(f, loop(), ZERO, buffer(STEPS)) is None


@pytest.mark.parametrize("name", OTHERS)
def test_rows_that_may_be_written_twice(name):
    assert rows_of(by_one(OTHERS[name]), loop(0), ZERO, buffer(2 * STEPS)) is None


COUNTERS = {
    "by two": (lambda i: i + 2, True),
    "from behind": (lambda i: 1 + i, True),
    "by three": (lambda i: i + 5 - 2, True),
    "backwards": (lambda i: i - 1, False),
    "at times": (lambda i: jnp.where(i == 2, i, i + 1), False),
    "doubling": (lambda i: 2 * i, False),
    "of few bits": (lambda i: (i.astype(jnp.int8) + 1).astype(jnp.int32), False),
}


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("start", [None, 0])
def test_counters(name, start):
    count, counts = COUNTERS[name]
    f = lambda i, rows: [count(i), rows.at[i].set(jnp.ones(WIDTH))]
    found = rows_of(f, loop(start), ZERO, buffer(3 * STEPS))
    assert found == (RowsOnce(0, 0, 0) if counts else None)


def test_two_rows_at_each_second_step():
    write = OTHERS["two"]
    f = lambda i, rows: [i + 2, write(rows, jnp.ones(WIDTH), i)]
    assert rows_of(f, loop(0), ZERO, buffer(2 * STEPS)) == RowsOnce(0, 0, 0)
    assert rows_of(f, loop(0), ZERO, buffer(2 * STEPS - 1)) is None


def test_a_batch_with_one_counter():
    write = lambda rows, i: CLAMPED["dynamic"](rows, jnp.ones(WIDTH), i)
    f = lambda i, rows: [i + 1, jax.vmap(write, (0, None))(rows, i)]
    batch = jnp.zeros((2, STEPS, WIDTH))
    assert rows_of(f, loop(0), ZERO, batch) == RowsOnce(1, 0, 0)
    counters = jnp.zeros(2, jnp.int32)
    f = lambda i, rows: [i + 1, jax.vmap(write)(rows, i)]
    assert rows_of(f, loop(), counters, batch) is None


def test_rows_along_another_axis():
    f = lambda i, rows: [i + 1, rows.at[:, i].set(1.0)]
    found = rows_of(f, loop(), ZERO, jnp.zeros((2, STEPS, 3)))
    assert found == RowsOnce(1, 0, 0)


def test_buffers_without_rows():
    assert rows_of(by_one(no_index), loop(), ZERO, buffer(0)) is None


@pytest.mark.parametrize("first", [0, -3, 5, -30, 2**31 - 4])
def test_the_buffer_before_a_step(first):
    """Put together from the first and the last, wherever the counter starts."""
    f, first = by_one(DROPPED["behind"][0]), jnp.asarray(first, jnp.int32)
    initial = jnp.arange(STEPS * 2.0).reshape(STEPS, 2)
    found = rows_of(f, loop(), first, initial)
    assert found is not None
    befores, carry = [], [first, initial]
    for _ in range(STEPS):
        befores.append(carry)
        carry = f(*carry)
    for count, before in befores:
        made = found.before(carry[1], initial, first, count)
        assert (made == before).all()
