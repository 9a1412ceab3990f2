"""Buffers that steps write rows to and read: the history of an equation with delays.

Everything is compared with `jax.lax.scan`, in all modes.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..derivatives import (
    LENGTH,
    MODES,
    forward_over_reverse,
    grad,
    inputs,
    mapped,
)
from ..marks import slow


def dynamic(rows, h, i):
    return lax.dynamic_update_index_in_dim(rows, h, i, 0)


def kept(rows, h, i):
    """A row that is written, or stays what it was."""
    return jnp.where(jnp.sum(h) > 0, rows.at[i].set(h), rows)


def slices(rows, h, i):
    return lax.dynamic_update_slice_in_dim(rows, jnp.stack([h, 2 * h]), i, 0)


WRITES = {
    "set": lambda rows, h, i: rows.at[i].set(h),
    "added to": lambda rows, h, i: rows.at[i].add(h),
    "dynamic": dynamic,
    "moved": lambda rows, h, i: rows.at[i + 2].set(h),
    "kept": kept,
    "clipped": lambda rows, h, i: rows.at[i].set(h, mode="clip"),
    # None of these writes each row once.
    "twice": lambda rows, h, i: rows.at[i].set(h).at[i + 1].set(2 * h),
    "ring": lambda rows, h, i: rows.at[i % 3].set(h),
    "same": lambda rows, h, i: rows.at[2].set(h),
    "slices": slices,
    "whole": lambda rows, h, i: jnp.roll(rows, 1, 0).at[i].set(h),
}
READS = {
    "delayed": lambda rows, i, d: rows[i - d],
    "clamped": lambda rows, i, d: rows[jnp.maximum(i - d, 0)],
    "several": lambda rows, i, d: jnp.mean(rows[i - jnp.array([1, d, 3])], 0),
    "sliced": lambda rows, i, d: jnp.mean(
        lax.dynamic_slice_in_dim(rows, i - d, 2, 0), 0
    ),
    "all": lambda rows, i, d: jnp.mean(jnp.sin(rows), 0),
    "fixed": lambda rows, i, d: rows[1] * rows[d],
}


def step(write, read, delay, w, carry, x):
    i, h, rows = carry
    past = READS[read](rows, i, delay)
    h = jnp.tanh(w[0] * h + w[1] * past + x)
    rows = WRITES[write](rows, h, i)
    return (i + 1, h, rows), h * jnp.sum(rows[i - 1])


def start(first, h, rows):
    return first, h, jnp.sin(jnp.outer(jnp.arange(1.0 * rows), h))


def of_scan(settings, first, rows, loop, w, h, us):
    f = functools.partial(step, *settings, w)
    (_, h, buffer), ys = loop(f, start(first, h, rows), us)
    return h, buffer, ys


def of_while(settings, first, rows, loop, w, h, us):
    def body(carry):
        count, carry = carry
        return count + 1, step(*settings, w, carry, us[count])[0]

    init = jnp.zeros((), jnp.int32), start(first, h, rows)
    _, (_, h, buffer) = loop(lambda carry: carry[0] < LENGTH, body)(init)
    return h, buffer


def as_while(cond, body):
    return lambda init: lax.scan(lambda c, _: (body(c), None), init, length=LENGTH)[0]


SCHEDULES = (
    el.Binomial(3),
    el.Binomial(2, block=2),
    el.Recursive(2),
    el.Recursive(2, batch=3),
    el.Chunked(3),
    el.Offload(el.Binomial(2)),
)
SCANS = [lambda f, c, x, s=s: el.Scan(f, schedule=s)(c, x) for s in SCHEDULES] + [
    lambda f, c, x: el.Scan(f, schedule=el.Recursive(3), policy="dots_saveable")(c, x),
    lambda f, c, x: el.ScanWhile(
        lambda c: True, f, max_steps=LENGTH, schedule=el.Binomial(2)
    )(c, x)[:2],
]
WHILES = (
    functools.partial(el.CheckpointedWhileLoop, checkpoints=2),
    functools.partial(el.CheckpointedWhileLoop, checkpoints=3, max_steps=LENGTH),
    functools.partial(el.BoundedWhileLoop, max_steps=LENGTH + 1, base=3),
)

some_settings = st.tuples(
    st.sampled_from(sorted(WRITES)),
    st.sampled_from(sorted(READS)),
    st.integers(-2, LENGTH + 2),
)
# A number of Python is known while tracing, an array is not.
some_start = st.one_of(
    st.just(0), st.integers(-3, 3), st.integers(-LENGTH - 9, LENGTH).map(np.int32)
)
some_rows = st.sampled_from([3, LENGTH, LENGTH + 1, LENGTH + 4])


def started(first):
    return first if isinstance(first, int) else jnp.asarray(first)


def assert_agree(mode, ours, theirs):
    found, expected = (
        jax.jit(functools.partial(mode, run))(*inputs()) for run in (ours, theirs)
    )
    assert_close(found, expected, rtol=3e-4, atol=3e-5)


def check_scan(settings, first, rows, at, mode, is_mapped):
    if is_mapped:
        mode = mapped(mode)
    of = functools.partial(of_scan, settings, started(first), rows)
    plain = functools.partial(of_scan, settings, jnp.asarray(first), rows, lax.scan)
    assert_agree(mode, functools.partial(of, SCANS[at]), plain)


def check_while(settings, first, rows, loop, mode):
    of = functools.partial(of_while, settings, started(first), rows)
    plain = functools.partial(of_while, settings, jnp.asarray(first), rows, as_while)
    assert_agree(mode, functools.partial(of, loop), plain)


of_a_scan = (
    some_settings,
    some_start,
    some_rows,
    st.integers(0, len(SCANS) - 1),
    st.sampled_from(MODES),
    st.booleans(),
)
of_a_while = (
    some_settings,
    some_start,
    some_rows,
    st.sampled_from(WHILES),
    st.sampled_from(MODES),
)


@hypothesis.settings(max_examples=2)
@hypothesis.given(*of_a_scan)
def test_scans_that_read_what_they_wrote(settings, first, rows, at, mode, is_mapped):
    check_scan(settings, first, rows, at, mode, is_mapped)


@hypothesis.settings(max_examples=2)
@hypothesis.given(*of_a_while)
def test_while_loops_that_read_what_they_wrote(settings, first, rows, loop, mode):
    check_while(settings, first, rows, loop, mode)


@pytest.mark.slow
@hypothesis.settings(max_examples=120)
@hypothesis.given(*of_a_scan)
def test_many_scans_that_read_what_they_wrote(
    settings, first, rows, at, mode, is_mapped
):
    check_scan(settings, first, rows, at, mode, is_mapped)


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@hypothesis.given(*of_a_while)
def test_many_while_loops_that_read_what_they_wrote(settings, first, rows, loop, mode):
    check_while(settings, first, rows, loop, mode)


# They take turns: those that come round are dropped or clamped at the other end.
@pytest.mark.parametrize(
    ("write", "first"),
    [
        ("set", 2),
        slow("set", -LENGTH - 2),
        slow("dynamic", 2),
        ("dynamic", -LENGTH - 2),
    ],
)
def test_counters_that_leave_the_buffer(write, first):
    """Rows come round, are dropped, or are clamped to the edge and written again."""
    check_scan((write, "delayed", 2), np.int32(first), LENGTH, 0, grad, False)


@pytest.mark.slow
def test_each_start_is_planned_by_itself():
    """Outside of `jit`, calls of the same types share what has been compiled."""
    settings = ("dynamic", "delayed", 2)
    for first in (0, 3, 0):  # from 3 on, the last row is written several times
        ours = functools.partial(of_scan, settings, first, LENGTH, SCANS[0])
        start = jnp.asarray(first)
        plain = functools.partial(of_scan, settings, start, LENGTH, lax.scan)
        found = grad(ours, *inputs())
        expected = jax.jit(functools.partial(grad, plain))(*inputs())
        assert_close(found, expected, rtol=3e-4, atol=0)


def test_a_delay_under_vmap():
    mode = forward_over_reverse
    check_scan(("dynamic", "clamped", 2), 0, LENGTH, 0, mode, True)


def test_a_delay_in_a_while_loop():
    check_while(("set", "delayed", 2), 0, LENGTH, WHILES[0], grad)


def plan_of(write, first, rows):
    w, h, us = inputs()
    f = functools.partial(step, write, "delayed", 2, w)
    return el.Scan(f, schedule=el.Binomial(3)).plan(start(first, h, rows), us)


def test_the_plan_says_what_is_saved_once():
    plan = plan_of("dynamic", 0, LENGTH)
    assert plan.saved_once == ("carry[2]",)
    assert dict(plan.holds) == {"carry[0]": True, "carry[1]": True, "carry[2]": False}
    assert "each holds         carry[0], carry[1]\n" in str(plan)
    assert "saved once         carry[2]\n" in str(plan)
    assert "and not" not in str(plan)
    assert "saved once         carry[2]\n" in str(plan_of("ring", 0, LENGTH))


ROWS, STATE = 1000, 64


def delayed(carry, x):
    i, h, rows = carry
    past = rows[jnp.maximum(i - 7, 0)]
    h = jnp.tanh(0.9 * h + 0.3 * past + x)
    return (i + 1, h, rows.at[i].set(h)), None


@pytest.mark.parametrize("schedule", [el.Binomial(20), slow(el.Chunked(30))], ids=repr)
def test_memory_of_a_history(schedule):
    """It lives once, with one cotangent, and not in every slot: that took 5.6 MB."""
    scan = el.Scan(delayed, schedule=schedule)

    def loss(h, rows, xs):
        (_, h, rows), _ = scan((0, h, rows), xs)
        return jnp.sum(rows**2) + jnp.sum(h)

    xs = jnp.ones((ROWS, STATE))
    args = jnp.ones(STATE), jnp.zeros((ROWS, STATE)), xs
    temp = temp_bytes(jax.grad(loss, (0, 1, 2)), *args)
    plan = scan.plan((0, *args[:2]), xs)
    each = 4 * ROWS * STATE
    # JAX 0.10 copies the cotangent on the CPU.
    assert temp <= 3 * each + 100 * 260
    assert temp <= plan.peak_bytes
    assert plan.slot_bytes == 4 + 4 * STATE
