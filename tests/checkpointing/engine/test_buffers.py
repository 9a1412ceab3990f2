"""What is said of random programs that write to buffers, beside what they do."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing.rewrites._masked_writes import (
    with_masked_writes,
    written_leaves,
)
from eqloop.checkpointing.steps._loop import Loop
from eqloop.checkpointing.steps._rows_once import rows_once
from eqloop.checkpointing.steps._step import trace_step

STEPS, ROWS, WIDTH = 4, 5, 2

# A program is a few of these, one after the other. Each changes some of a counter, a
# row, a buffer, and another one of as many rows; `at` is an index.
CHANGES = {
    "set": lambda i, h, rows, other, at: (h, rows.at[at].set(h), other),
    "add": lambda i, h, rows, other, at: (h, rows.at[at].add(h), other),
    "clip": lambda i, h, rows, other, at: (h, rows.at[at].set(h, mode="clip"), other),
    "update": lambda i, h, rows, other, at: (
        h,
        lax.dynamic_update_slice_in_dim(rows, h[None], at, 0),
        other,
    ),
    "two": lambda i, h, rows, other, at: (
        h,
        lax.dynamic_update_slice_in_dim(rows, jnp.stack([h, h]), at, 0),
        other,
    ),
    "several": lambda i, h, rows, other, at: (
        h,
        rows.at[at + jnp.arange(2)].set(h),
        other,
    ),
    "at times": lambda i, h, rows, other, at: (
        h,
        jnp.where(h[0] > 0, rows.at[at].set(h), rows),
        other,
    ),
    "kept": lambda i, h, rows, other, at: (
        h,
        rows.at[at].set(jnp.where(h > 0, h, rows[at])),
        other,
    ),
    "swapped": lambda i, h, rows, other, at: (h, other, rows),
    "moved": lambda i, h, rows, other, at: (h, rows, other.at[0].set(rows[at])),
    "moved in jit": lambda i, h, rows, other, at: (
        h,
        *jax.jit(lambda r, o: (r.at[at].set(r[i]), o.at[0].set(r[at])))(rows, other),
    ),
    "in jit": lambda i, h, rows, other, at: (
        h,
        jax.jit(lambda r: r.at[at].set(h))(rows),
        other,
    ),
    "in a loop": lambda i, h, rows, other, at: (
        h,
        _in_a_loop(h, rows, at),
        other,
    ),
    "zeros": lambda i, h, rows, other, at: (
        h,
        rows + jnp.zeros_like(rows).at[at].set(h),
        other,
    ),
    "by zeros": lambda i, h, rows, other, at: (
        h * jnp.sqrt(jnp.sum(jnp.zeros_like(rows).at[0].set(rows[at]) ** 2)),
        rows,
        other,
    ),
    "row": lambda i, h, rows, other, at: (rows[at], rows, other),
    "used": lambda i, h, rows, other, at: (jnp.sin(h * other[at]), rows, other),
    "turned": lambda i, h, rows, other, at: (h, jnp.roll(rows, 1, 0), other),
    "row for row": lambda i, h, rows, other, at: (h[::-1] + 1, rows, other),
}
INDICES = {
    "at it": lambda i: i,
    "behind": lambda i: 1 + i,
    "before": lambda i: i - 2,
    "double": lambda i: 2 * i,
    "modulo": lambda i: i % 3,
    "fixed": lambda i: jnp.full_like(i, 2),
}


def _in_a_loop(h, rows, at):
    step = lambda carry, _: ((carry[0].at[carry[1]].set(h), carry[1] + 1), None)
    return el.Scan(step, schedule=el.Recursive(2))((rows, at), length=2)[0][0]


def step_of(changes, stride):
    def step(carry, _):
        i, h, rows, other = carry
        for change, index in changes:
            h, rows, other = CHANGES[change](i, h, rows, other, INDICES[index](i))
        return [i + stride, h, rows, other], []

    return step


def carry_of(start):
    rows = jnp.cos(jnp.arange(2.0 * ROWS * WIDTH)).reshape(2, ROWS, WIDTH)
    return [jnp.asarray(start, jnp.int32), jnp.array([0.3, -0.4]), *rows]


some_changes = st.lists(
    st.tuples(st.sampled_from(sorted(CHANGES)), st.sampled_from(sorted(INDICES))),
    min_size=1,
    max_size=3,
)


def check_rows(changes, stride, start, is_known):
    """A buffer is put together from the first and the last, if its rows are once."""
    f, first = step_of(changes, stride), carry_of(start)
    step, _ = trace_step(f, list(map(jax.typeof, first)), [])
    known = (start, None, None, None) if is_known else (None,) * 4
    found = rows_once(step, Loop(STEPS, starts=known))
    befores, carry = [], first
    for _ in range(STEPS):
        befores.append(carry)
        carry, _ = step([], carry, [])
    for leaf, rows in enumerate(found):
        for before in befores if rows is not None else ():
            counters = first[rows.counter], before[rows.counter]
            made = rows.before(carry[leaf], first[leaf], *counters)
            np.testing.assert_array_equal(made, before[leaf])


def check_masked(changes, stride, start):
    """Buffers stay as they are under a mask, and harm nothing if they do not fit."""
    init = carry_of(start)
    step, _ = trace_step(step_of(changes, stride), list(map(jax.typeof, init)), [])
    written = written_leaves(step)
    masked = with_masked_writes(step, written)
    for old, new in zip(
        step([], init, [])[0], masked([True], init, [])[0], strict=True
    ):
        np.testing.assert_array_equal(old, new)
    # Where an example has stopped, the rows of its buffers may be anything.
    i, *others = [
        jnp.full_like(x, jnp.nan) if flag else x
        for x, flag in zip(init, written, strict=True)
    ]
    after, pull = jax.vjp(
        lambda *others: masked([False], [i, *others], [])[0][1:], *others
    )
    marks = written[1:]
    cts = [jnp.full_like(x, float(flag)) for x, flag in zip(after, marks, strict=True)]
    found = pull(cts)
    for flag, before, x, ct in zip(marks, others, after, found, strict=True):
        if flag:
            np.testing.assert_array_equal(x, before)
        np.testing.assert_array_equal(ct, jnp.full_like(ct, float(flag)))


of_programs = (
    some_changes,
    st.sampled_from([1, 1, 2, -1]),
    st.integers(-3, 4),
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(*of_programs, st.booleans())
def test_rows_that_are_written_once(changes, stride, start, is_known):
    check_rows(changes, stride, start, is_known)


@hypothesis.settings(max_examples=15)
@hypothesis.given(*of_programs)
def test_writes_that_are_masked(changes, stride, start):
    check_masked(changes, stride, start)


@pytest.mark.parametrize(
    ("change", "is_written"),
    [("kept", True), ("row", True), ("in a loop", True), ("at times", False)],
)
def test_writes_that_can_be_masked(change, is_written):
    """Not if a version of the buffer is used twice: XLA would copy it in any case."""
    types = list(map(jax.typeof, carry_of(0)))
    step, _ = trace_step(step_of([(change, "at it")], 1), types, [])
    assert written_leaves(step) == (False, False, is_written, True)
