"""Buffers of which each step writes a row, against `jax.lax.scan`, in all modes."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing.engine.leaves._row_lists import RowList

from ..asserts import assert_close
from ..derivatives import MODES, WIDTH, grad, inputs, mapped

ROWS = 512  # of 4 floats: smaller lines are moved as they are
FEW = 5

SCHEDULES = (
    el.Binomial(3),
    el.Binomial(2, block=2),
    el.Recursive(2),
    el.Recursive(2, batch=3),
    el.Chunked(3),
    el.Chunked(1, batch=4),
    el.Offload(el.Binomial(2)),
)
SCANS = [lambda f, c, x, s=s: el.Scan(f, schedule=s)(c, x) for s in SCHEDULES] + [
    lambda f, c, x: el.Scan(f, schedule=el.Binomial(2), reverse=True, unroll=2)(c, x),
    lambda f, c, x: el.SlicedScan(f, step=3, schedule=el.Chunked(2))(c, x),
]
PLAIN = [lax.scan] * len(SCHEDULES) + [
    lambda f, c, x: lax.scan(f, c, x, reverse=True),
    lambda f, c, x: (lambda c, ys: (c, ys[::3]))(*lax.scan(f, c, x)),
]


def at(buffer, row):
    return lax.dynamic_index_in_dim(buffer, row, 0, keepdims=False)


def by_slices(rows):
    """The ways to write a delay line that move all of its rows.

    Each is given the line and a row, and returns the line with the row in it. The
    newest row is the first, unless the name says otherwise.
    """
    return {
        "roll": lambda line, h: jnp.roll(line, 1, 0).at[0].set(h),
        "concatenate": lambda line, h: jnp.concatenate([h[None], line[:-1]]),
        "newest last": lambda line, h: jnp.concatenate([line[1:], h[None]]),
        "roll back": lambda line, h: jnp.roll(line, -1, 0).at[-1].set(h),
        "update": lambda line, h: lax.dynamic_update_slice(
            jnp.roll(line, 1, 0), h[None], (0, 0)
        ),
        "in jit": jax.jit(lambda line, h: jnp.concatenate([line[1:], h[None]])),
    }


MOVED = by_slices(ROWS)
# Ways to read some of a line.
READS = {
    "a row": lambda line: line[3],
    "the last row": lambda line: line[-1],
    "another row": lambda line: at(line, jnp.argmax(jnp.abs(line[1])) + 2),
    "some rows": lambda line: jnp.sum(line[jnp.array([0, 5, 2])], 0),
    "a part": lambda line: jnp.sum(line[2:6], 0),
    "a part of a part": lambda line: line[1:][2:9][3],
    "every third row": lambda line: jnp.sum(line[::3], 0),
    "entries": lambda line: line[jnp.array([3, 1, 4, 1]), jnp.arange(WIDTH)],
    "a column": lambda line: jnp.full(WIDTH, jnp.sum(line[:, 1])),
    "all": lambda line: jnp.mean(line, 0),
    "out of bounds": lambda line: line.at[ROWS + 3].get(mode="fill", fill_value=0.5),
}


def moving(write, read, w, loop, h, us):
    """A loop whose state is delayed by a line."""

    def step(carry, u):
        line, h = carry
        before = READS[read](line)
        h = jnp.tanh(w[0] * h + w[1] * before + u)
        line = MOVED[write](line, h)
        return (line, h), h * READS[read](line)

    line = jnp.sin(jnp.arange(ROWS * WIDTH, dtype=h.dtype)).reshape(ROWS, WIDTH)
    (line, h), ys = loop(step, (line * h[None], h), us)
    return line, h, ys


def rows_of(h):
    start = jnp.sin(jnp.arange(FEW * WIDTH, dtype=h.dtype)).reshape(FEW, WIDTH)
    return start * h[None]


INDICES = np.array([3, 1, 3, 0, 7, -2, 1])


def to_ring(i):
    return i % FEW


# For each way to write to a buffer: from the buffer, a row, the number of the step and
# an index to the buffer.
WRITES = {
    "ring": lambda v, h, i, k: v.at[i % FEW].set(h),
    "ring from behind": lambda v, h, i, k: v.at[(i + 3) % FEW].set(h),
    "ring by update": lambda v, h, i, k: lax.dynamic_update_slice(
        v, h[None], (lax.rem(i, FEW), 0)
    ),
    "smaller ring": lambda v, h, i, k: v.at[i % 3].set(h),
    "added to": lambda v, h, i, k: v.at[i % FEW].add(h),
    "index": lambda v, h, i, k: v.at[k].set(h),
    "clipped index": lambda v, h, i, k: v.at[k].set(h, mode="clip"),
    "two": lambda v, h, i, k: v.at[k].set(h).at[i % 3].set(2 * h),
    "twice": lambda v, h, i, k: v.at[k].set(h).at[k].multiply(2),
    "block": lambda v, h, i, k: lax.dynamic_update_slice(
        v, jnp.stack([h, -h]), (k, jnp.zeros_like(k))
    ),
    "several": lambda v, h, i, k: v.at[jnp.stack([k, 4 - k])].set(h[None]),
    "at times": lambda v, h, i, k: jnp.where(h[0] > 0, v.at[k].set(h), v),
    "part": lambda v, h, i, k: v.at[k, :2].set(h[:2]),
    "entry": lambda v, h, i, k: v.at[k, i % WIDTH].set(h[0]),
    "same place": lambda v, h, i, k: v.at[2].set(h),
}


def writing(write, w, loop, h, us, before=True):
    def step(carry, x):
        i, v, h = carry
        u, k = x
        new = jnp.tanh(w[0] * h + w[1] * at(v, (i + 2) % FEW) + u * v[k])
        v = WRITES[write](v, new, i, k)
        return (i + 1, v, new), new * v[(i - 2) % FEW] * jnp.sum(v[jnp.array([0, 3])])

    indices = jnp.asarray(INDICES)
    init = jnp.zeros((), jnp.int32), rows_of(h), h
    (_, v, h), ys = loop(step, init, (us, indices))
    return v, h, ys


def run(name, w, loop, h, us):
    if name in WRITES:
        return writing(name, w, loop, h, us)
    return moving(*name, w, loop, h, us)


def check(name, place, mode, is_mapped=False):
    mode = mapped(mode) if is_mapped else mode
    runs = [
        lambda w, h, us, loop=loops[place]: run(name, w, loop, h, us)
        for loops in (SCANS, PLAIN)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # Whatever takes less memory: these loops are short.
        patch.setattr(RowList, "takes_less", lambda self, carries: True)
        actual, expected = (
            jax.jit(functools.partial(mode, each))(*inputs()) for each in runs
        )
    assert_close(actual, expected, rtol=3e-4, atol=3e-5)


NAMES = [*WRITES, *((write, read) for write in MOVED for read in READS)]
cases = (
    st.sampled_from(NAMES),
    st.integers(0, len(SCANS) - 1),
    st.sampled_from(MODES),
    st.booleans(),
)


@pytest.mark.parametrize("name", WRITES)
def test_the_gradient_with_each_way_to_write(name):
    check(name, 0, grad)


@hypothesis.settings(max_examples=4)
@hypothesis.given(*cases)
def test_buffers_of_which_rows_are_written(name, place, mode, is_mapped):
    check(name, place, mode, is_mapped)


@pytest.mark.slow
@hypothesis.settings(max_examples=300)
@hypothesis.given(*cases)
def test_many_buffers(name, place, mode, is_mapped):
    check(name, place, mode, is_mapped)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRITES)
def test_each_way_to_write_in_each_mode(name, mode):
    check(name, 0, mode)
