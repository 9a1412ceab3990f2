"""Programs that write to buffers, beside the same ones before they were rewritten."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

import eqloop as el
from eqloop._programs import WRITES, run
from eqloop.checkpointing.rewrites import _in_place

from ...asserts import assert_close
from ...canaries.hlo import optimised

pytestmark = pytest.mark.sampled

ROWS, WIDTH = 6, 2


def in_place(program, drops_barriers=False):
    """The program for an XLA that drops barriers, or does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_in_place, "drops_barriers", lambda: drops_barriers)
        return _in_place.in_place.__wrapped__(program)


def read_and_written(buffer, i, row):
    """What is read is that of before, wherever it stands."""
    after = buffer.at[i].set(jnp.sin(row))
    return after, buffer[i] * 2, buffer[(i + 1) % ROWS]


def read_after(buffer, i, row):
    """A row that is read where it has been written cannot be read before."""
    after = buffer.at[i].set(row)
    return after.at[i + 1].set(after[i] + buffer[i]), buffer[0]


def still_needed(buffer, i, row):
    return buffer.at[i].add(row), buffer


def computed_as_a_whole(buffer, i, row):
    return buffer.at[i].set(row), jnp.sum(buffer)


def put_back(buffer, i, row):
    """The cotangents of a row that is kept, or else read and written again."""
    f = lambda b: b.at[i].set(jnp.where(row > 0, row, b[i]))
    return jax.vjp(f, buffer)[1](jnp.cos(buffer))


def in_a_batch(buffer, i, row):
    f = lambda b, r: b.at[i].set(jnp.where(r > 0, r, b[i]))
    rows = jnp.stack([row, -row])
    batch = lambda b: jax.vmap(f)(b, rows)
    buffers = jnp.stack([buffer, 3 * buffer])
    return jax.vjp(batch, buffers)[1](jnp.cos(buffers))


def read_for_the_index(buffer, i, row):
    """Where to write is read from the buffer itself."""
    at = jnp.abs(buffer[i, 0]).astype(int) % ROWS
    return buffer.at[at].set(row), buffer[i] * 2


def read_along(buffer, i, row):
    """With `dynamic_slice`, which moves an index into the buffer."""
    after = lax.dynamic_update_slice(buffer, row[None], (i, 0))
    return after, lax.dynamic_slice(buffer, (i - 1, 0), (2, WIDTH)), buffer[0]


def always_the_first(buffer, i, row):
    return buffer.at[0].set(row), buffer[0] + buffer[i]


def in_a_loop(buffer, i, row):
    step = lambda b, k: (b.at[k].set(b[k] + row), b[i])
    return lax.scan(step, buffer, jnp.arange(ROWS))


PROGRAMS = {
    f.__name__: f
    for f in (
        read_and_written,
        read_after,
        still_needed,
        computed_as_a_whole,
        put_back,
        in_a_batch,
        read_for_the_index,
        read_along,
        always_the_first,
        in_a_loop,
    )
}


@pytest.mark.parametrize("drops_barriers", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@given(i=st.integers(-2, ROWS + 1))
def test_the_meaning_is_the_same(name, drops_barriers, i):
    buffer = jnp.arange(1.0 * ROWS * WIDTH).reshape(ROWS, WIDTH)
    args = buffer, jnp.asarray(i), jnp.array([0.5, -0.5])
    program = jax.make_jaxpr(PROGRAMS[name])(*args)
    flat = jax.tree.leaves(args)
    found = run(in_place(program, drops_barriers), *flat)
    for a, b in zip(found, run(program, *flat), strict=True):
        np.testing.assert_array_equal(a, b)


def test_reads_come_before_the_write():
    args = jnp.zeros((ROWS, WIDTH)), jnp.asarray(0), jnp.ones(WIDTH)
    program = in_place(jax.make_jaxpr(read_and_written)(*args))
    names = [eqn.primitive.name for eqn in program.eqns]
    (barrier,) = (i for i, name in enumerate(names) if name == "optimization_barrier")
    assert {"gather", "dynamic_slice"}.isdisjoint(names[barrier:])
    assert any(name.startswith("scatter") for name in names[barrier:])


def test_no_whole_buffer_is_added():
    args = jnp.zeros((ROWS, WIDTH)), jnp.asarray(0), jnp.ones(WIDTH)
    program = jax.make_jaxpr(in_a_batch)(*args)
    assert "add_any" in str(program)
    assert "add_any" not in str(in_place(program))


@pytest.mark.parametrize("name", ["put_back", "in_a_batch", "read_along"])
def test_the_index_to_write_at_comes_with_what_is_read(name):
    args = jnp.zeros((ROWS, WIDTH)), jnp.asarray(0), jnp.ones(WIDTH)
    program = in_place(jax.make_jaxpr(PROGRAMS[name])(*args), drops_barriers=True)
    (branch,) = (eqn for eqn in program.eqns if eqn.primitive.name == "cond")
    (write,) = (
        eqn
        for eqn in program.eqns
        if eqn.primitive.name in WRITES
        and any(x in branch.outvars for x in eqn.invars[1:])
    )
    users = [eqn for eqn in program.eqns if write.invars[0] in eqn.invars]
    assert users == [branch, write]


def test_a_way_back_copies_no_buffer():
    """Not even where it reads the very row that it writes to, at every step."""
    rows = 1000

    def loss(h):
        def body(carry):
            i, h, rows = carry
            h = jnp.sin(h)
            rows = rows.at[i].set(jnp.where(h > 0, h, rows[i]))
            return i + 1, h, rows

        loop = el.CheckpointedWhileLoop(lambda c: c[0] < rows, body, checkpoints=8)
        return jnp.sum(loop((0, h, jnp.zeros((rows, WIDTH))))[2] ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(WIDTH)).compile()
    assert not re.findall(rf"= f32\[{rows},{WIDTH}\]\S* copy\(", compiled.as_text())
    # One buffer, and one for its cotangent.
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= 2.2 * 4 * rows * WIDTH


@pytest.mark.parametrize(
    "schedule",
    [el.StoreAll(), el.StoreLast(el.Chunked(40), 600), el.Chunked(1000, batch=20)],
    ids=repr,
)
@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
def test_no_step_copies_a_buffer(schedule, reads):
    """JAX's own derivative of a scan copies it, twice."""
    rows = 1000

    def step(carry, x):
        i, h, rows = carry
        h = jnp.tanh(h + x + rows[jnp.maximum(i - 5, 0)] if reads else h + x)
        return (i + 1, h, rows.at[i].set(h)), None

    def loss(scan, h, xs):
        carry, _ = scan(step, (0, h, jnp.zeros((rows, WIDTH))), xs)
        return jnp.sum(carry[2] ** 2)

    args = jnp.ones(WIDTH), jnp.ones((rows, WIDTH))
    scan = lambda f, init, xs: el.Scan(f, schedule=schedule)(init, xs)
    ours = lambda *args: jax.grad(loss, (1, 2))(scan, *args)
    theirs = lambda *args: jax.grad(loss, (1, 2))(lax.scan, *args)
    assert_close(jax.jit(ours)(*args), jax.jit(theirs)(*args))
    assert optimised(ours, *args).whole(4 * rows * WIDTH) == []
