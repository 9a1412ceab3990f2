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
from eqloop._programs import run
from eqloop.checkpointing.engine._in_place import in_place

pytestmark = pytest.mark.sampled

ROWS, WIDTH = 6, 2


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
        in_a_loop,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
@given(i=st.integers(-2, ROWS + 1))
def test_the_meaning_is_the_same(name, i):
    buffer = jnp.arange(1.0 * ROWS * WIDTH).reshape(ROWS, WIDTH)
    args = buffer, jnp.asarray(i), jnp.array([0.5, -0.5])
    program = jax.make_jaxpr(PROGRAMS[name])(*args)
    flat = jax.tree.leaves(args)
    for a, b in zip(run(in_place(program), *flat), run(program, *flat), strict=True):
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


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="XLA copies in spite of a barrier"
)
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
