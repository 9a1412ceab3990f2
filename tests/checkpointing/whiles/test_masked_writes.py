"""Rows that examples write, which stop at their own time, beside one by one."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing.rewrites._masked_writes import written_leaves
from eqloop.checkpointing.steps._step import trace_step

from ...asserts import assert_close
from ...marks import slow

pytestmark = pytest.mark.sampled

ROWS, WIDTH, EXAMPLES = 24, 3, 5
STOPS = jnp.array([7, 0, 24, 1, 12])
W = jnp.array([0.9, 0.5, -0.7])


def appended(h, rows, i):
    """A row behind the last one."""
    return rows.at[i].set(h), i + 1


def kept(h, rows, i):
    """Every other row, as by a solver that rejects steps."""
    keep = h[0] > 0
    return rows.at[i].set(jnp.where(keep, h, rows[i])), i + keep.astype(int)


def sliced(h, rows, i):
    """Two rows at once, which are written over, and moved at the end of the buffer."""
    return lax.dynamic_update_slice(rows, jnp.stack([h, 2 * h]), (i, 0)), i + 1


def added(h, rows, i):
    """Rows that are added to, some of them twice."""
    return rows.at[jnp.array([i // 2, i])].add(h), i + 1


def within_jit(h, rows, i):
    return jax.jit(appended)(h, rows, i)


def in_a_loop(h, rows, i):
    """Several rows a step, in a loop within it."""
    more = i + jnp.where(h[0] > 0, 2, 1)
    body = lambda c: (c[0].at[c[1]].set(h * c[1]), c[1] + 1)
    loop = el.CheckpointedWhileLoop(lambda c: c[1] < more, body, max_steps=2)
    return loop((rows, i))


def out_of_bounds(h, rows, i):
    """Some writes of a step that is run are dropped, and some count from the end."""
    return rows.at[3 * i - 9].set(h), i + 1


def computed_with(h, rows, i):
    """No such buffer: a row that is read decides on the next."""
    row = rows[jnp.maximum(i - 1, 0)]
    return rows.at[i].set(h + jnp.sqrt(1 + row**2)), i + 1


def by_way_of_another(h, rows, i):
    """No such buffer: a row is written to another one, and that is computed with."""
    other = jnp.zeros((2, WIDTH)).at[0].set(rows[i])
    # Singular where an example has stopped.
    return rows.at[i].set(0 * h * jnp.sqrt(jnp.sum(other**2))), i + 1


def by_way_of_a_call(h, rows, i):
    """No such buffer: the same, where a call returns both of them."""
    both = lambda rows: (jnp.zeros((2, WIDTH)).at[0].set(rows[i]), rows.at[i].set(h))
    other, rows = jax.jit(both)(rows)
    return rows.at[i].set(0 * h * jnp.sqrt(jnp.sum(other**2))), i + 1


def by_way_of_a_loop(h, rows, i):
    """No such buffer: the same, where a loop within the step returns both of them."""

    def move(carry, _):
        rows, other = carry
        return (rows.at[i].set(h), other.at[0].set(rows[i])), None

    init = rows, jnp.zeros((2, WIDTH))
    (rows, other), _ = el.Scan(move, schedule=el.Recursive(2))(init, length=2)
    return rows.at[i].set(0 * h * jnp.sqrt(jnp.sum(other**2))), i + 1


def everywhere(h, rows, i):
    """No such buffer: there is no index that could be out of bounds."""
    return rows.at[:].add(h), i + 1


WRITES = {
    f.__name__: f
    for f in (appended, kept, sliced, added, within_jit, in_a_loop, out_of_bounds)
}
OTHERS = {
    f.__name__: f
    for f in (
        computed_with,
        by_way_of_another,
        by_way_of_a_call,
        by_way_of_a_loop,
        everywhere,
    )
}
EVERY = WRITES | OTHERS


def checkpointed(cond, body, init):
    return el.CheckpointedWhileLoop(cond, body, checkpoints=4, max_steps=ROWS)(init)


def bounded(cond, body, init):
    return el.BoundedWhileLoop(cond, body, max_steps=ROWS, base=4)(init)


def scan_while(cond, body, init):
    step = lambda carry, _: (body(carry), None)
    return el.ScanWhile(cond, step, max_steps=ROWS, schedule=el.Binomial(4))(init)[0]


def plain(cond, body, init):
    """Plain JAX: a scan whose steps are selected."""

    def step(carry, _):
        runs = cond(carry)
        new = body(carry)
        return jax.tree.map(lambda a, b: jnp.where(runs, a, b), new, carry), None

    return lax.scan(step, init, length=ROWS)[0]


LOOPS = {f.__name__: f for f in (checkpointed, bounded, scan_while)}


def loss(loop, write, w, h, stop, rows=None):
    def body(carry):
        count, h, rows, i = carry
        h = jnp.sin(w * h + 1.3 * jnp.roll(h, 1))
        return (count + 1, h, *write(h, rows, i))

    rows = jnp.full((ROWS, WIDTH), 0.1) if rows is None else rows
    init = (0, h, rows, 0)
    _, h, rows, i = loop(lambda carry: carry[0] < stop, body, init)
    weights = jnp.cos(jnp.arange(1.0 * rows.size)).reshape(rows.shape)
    return jnp.sum(weights * rows**2) + jnp.sum(h) + 0.1 * i.astype(float)


def inputs():
    hs = jnp.sin(jnp.arange(1.0 * EXAMPLES * WIDTH)).reshape(EXAMPLES, WIDTH)
    rows = 0.1 + jnp.cos(jnp.arange(1.0 * EXAMPLES * ROWS * WIDTH))
    return W, hs, rows.reshape(EXAMPLES, ROWS, WIDTH)


def of_batch(loop, write):
    one = functools.partial(loss, loop, write)
    return lambda w, hs, rows: jax.vmap(one, (None, 0, 0, 0))(w, hs, STOPS, rows)


def gradient(f):
    return jax.grad(lambda *args: f(*args).sum(), (0, 1, 2))


def each_gradient(loop, write):
    one = jax.grad(functools.partial(loss, loop, write), (0, 1, 3))
    return lambda w, hs, rows: jax.vmap(one, (None, 0, 0, 0))(w, hs, STOPS, rows)


near = functools.partial(assert_close, rtol=2e-4, atol=2e-4)


@functools.cache
def expected(mode, write):
    return jax.jit(MODES[mode](of_batch(plain, EVERY[write])))(*inputs())


def tangents(f):
    return lambda *args: jax.jvp(f, args, args)


def forward_over_reverse(f):
    return lambda *args: jax.jvp(gradient(f), args, args)


def reverse_over_reverse(f):
    total = lambda *args: sum(jnp.sum(ct**2) for ct in gradient(f)(*args))
    return jax.grad(total, (0, 1, 2))


MODES = {
    f.__name__: f
    for f in (gradient, tangents, forward_over_reverse, reverse_over_reverse)
}
QUICK = [
    ("gradient", "kept", "scan_while"),
    ("gradient", "in_a_loop", "checkpointed"),
    ("gradient", "sliced", "bounded"),
]
EVERY_CASE = itertools.product(MODES, EVERY, LOOPS)
CASES = [*QUICK, *(slow(*case) for case in EVERY_CASE if case not in QUICK)]


@pytest.mark.parametrize("write", EVERY)
def test_buffers_that_are_only_written_to(write):
    step = lambda carry, _: ([carry[0], *EVERY[write](*carry)], [])
    types = [jax.typeof(x) for x in (W, jnp.zeros((ROWS, WIDTH)), jnp.asarray(0))]
    step, _ = trace_step(step, types, [])
    assert written_leaves(step) == (False, write in WRITES, False)


@pytest.mark.parametrize(("mode", "write", "loop"), CASES)
def test_batches_are_those_of_plain_jax(mode, write, loop):
    f = MODES[mode](of_batch(LOOPS[loop], EVERY[write]))
    near(jax.jit(f)(*inputs()), expected(mode, write))


@pytest.mark.slow
@pytest.mark.parametrize("write", EVERY)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_batch_of_gradients(write, loop):
    actual = jax.jit(each_gradient(LOOPS[loop], EVERY[write]))(*inputs())
    near(actual, jax.jit(each_gradient(plain, EVERY[write]))(*inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("write", EVERY)
@pytest.mark.parametrize("loop", LOOPS)
def test_batches_of_batches(write, loop):
    def both(loop):
        one = functools.partial(loss, loop, EVERY[write])
        many = jax.vmap(jax.vmap(one, (None, 0, 0, 0)), (None, None, 0, None))
        total = lambda w, hs, rows: many(
            w, hs, jnp.stack([STOPS, STOPS[::-1] // 2]), rows
        ).sum()
        return jax.jit(jax.grad(total, (0, 1, 2)))(*inputs())

    near(both(LOOPS[loop]), both(plain))


def compiled(loop, write, rows):
    """The program of a gradient, with buffers of so many rows."""
    w, hs, _ = inputs()
    one = functools.partial(loss, LOOPS[loop], EVERY[write])

    def total(w, hs):
        buffer = jnp.zeros((rows, WIDTH))
        return jax.vmap(lambda h, stop: one(w, h, stop, buffer))(hs, STOPS).sum()

    return jax.jit(jax.grad(total, (0, 1))).lower(w, hs).compile()


def kinds_of_operations(program, rows):
    """What is computed of whole buffers, at any depth, and how often."""
    shape = rf"f32\[{EXAMPLES},{rows},{WIDTH}\]"
    found = re.findall(rf"= {shape}\S* ([a-z\-]+)\(", program.as_text())
    return {kind: found.count(kind) for kind in found}


def test_indices_of_64_bits():
    """An index beyond 32 bits is out of bounds, and not what is left of it."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    mode = lax.GatherScatterMode.FILL_OR_DROP

    def body(carry):
        i, rows = carry
        at = (2**32 + i.astype(jnp.uint64))[None]
        return i + 1, lax.scatter(rows, at, 1.0, numbers, mode=mode)

    def run(stop):
        loop = el.BoundedWhileLoop(lambda carry: carry[0] < stop, body, max_steps=4)
        return loop((jnp.asarray(0), jnp.zeros(ROWS)))[1]

    with jax.enable_x64(True):
        assert not jax.vmap(run)(jnp.array([1, 3])).any()


@pytest.mark.parametrize(
    ("write", "loop"),
    [
        ("kept", "checkpointed"),
        slow("in_a_loop", "checkpointed"),
        slow("appended", "scan_while"),
        slow("sliced", "bounded"),
        slow("within_jit", "checkpointed"),
        slow("out_of_bounds", "scan_while"),
    ],
)
def test_no_step_selects_a_whole_buffer(write, loop):
    program = compiled(loop, write, 1000)
    assert "select" not in kinds_of_operations(program, 1000)


def test_buffers_are_not_copied_for_the_way_back():
    """Buffers and their cotangents are all there is that grows with the rows."""
    few, many = (
        compiled("checkpointed", "kept", rows).memory_analysis()
        for rows in (1000, 2000)
    )
    more = many.temp_size_in_bytes - few.temp_size_in_bytes
    assert more <= 2 * 4 * EXAMPLES * 1000 * WIDTH
