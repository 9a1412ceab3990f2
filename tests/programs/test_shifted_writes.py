"""Writes that move rows within a buffer, which XLA computes wrongly on the CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._programs import without_shifted_writes

from ..compiling import AS_USED
from ..marks import slow

pytestmark = pytest.mark.sampled

LENGTH = 12


def delay(rows: Any, x: Any) -> Any:
    rows = jnp.sin(rows) + 1
    shifted = rows.at[1:].set(rows[:-1])
    return shifted.at[0].set(x), shifted


def ring(rows: Any, x: Any) -> Any:
    rows = rows.at[1:].set(rows[:-1])
    return rows.at[0].set(x * rows[-1]), jnp.sin(rows[2])


def sliced(rows: Any, x: Any) -> Any:
    rows = lax.dynamic_update_slice(rows, jnp.cos(rows[:-2]) * x[None], (2, 0))
    return rows, rows[1]


def delay_without_writes(rows: Any, x: Any) -> Any:
    rows = jnp.sin(rows) + 1
    shifted = jnp.concatenate([rows[:1], rows[:-1]])
    return jnp.concatenate([x[None], shifted[1:]]), shifted


def ring_without_writes(rows: Any, x: Any) -> Any:
    rows = jnp.concatenate([rows[:1], rows[:-1]])
    return jnp.concatenate([(x * rows[-1])[None], rows[1:]]), jnp.sin(rows[2])


def sliced_without_writes(rows: Any, x: Any) -> Any:
    rows = jnp.concatenate([rows[:2], jnp.cos(rows[:-2]) * x[None]])
    return rows, rows[1]


STEPS = {
    delay: delay_without_writes,
    ring: ring_without_writes,
    sliced: sliced_without_writes,
}
SCHEDULES = (
    el.Recursive(2),
    el.Chunked(2),
    el.Chunked(4, batch=4),
    el.Binomial(3),
)


def loss(scan: Any) -> Any:
    def run(rows: Any, xs: Any) -> Any:
        rows, ys = scan(rows, xs)
        return jnp.sum(jnp.cos(rows)) + jnp.sum(jnp.sin(ys))

    return jax.value_and_grad(run, (0, 1))


@pytest.mark.parametrize("unroll", [1, slow(2), 4])
@pytest.mark.parametrize("step", STEPS)
def test_a_delay_line_in_a_loop_is_as_written_without_writes(step, unroll):
    rows = jnp.cos(jnp.arange(40.0).reshape(8, 5))
    xs = jnp.sin(jnp.arange(5.0 * LENGTH)).reshape(LENGTH, 5)
    plain = lambda *args: lax.scan(STEPS[step], *args)
    want = jax.jit(loss(plain))(rows, xs)
    for schedule in SCHEDULES:
        scan = el.Scan(step, schedule=schedule, unroll=unroll)
        # With LLVM's usual passes, as users have them.
        run = jax.jit(loss(scan)).lower(rows, xs).compile(AS_USED)
        for a, b in zip(*map(jax.tree.leaves, (run(rows, xs), want)), strict=True):
            np.testing.assert_allclose(
                a, b, rtol=1e-4, atol=1e-5, err_msg=str(schedule)
            )


def test_a_loop_of_one_step():
    rows, xs = jnp.cos(jnp.arange(40.0).reshape(8, 5)), jnp.ones((1, 5))
    for schedule in (el.StoreAll(), el.Recursive(2)):
        _, got = jax.jit(el.Scan(delay, schedule=schedule))(rows, xs)
        np.testing.assert_allclose(got[0], delay_without_writes(rows, xs[0])[1], 1e-6)


def test_what_moves_no_rows_is_not_changed():
    def program(f: Any) -> Any:
        return jax.make_jaxpr(f)(jnp.ones((5, 3)), 1)

    for f in (
        lambda b, i: b.at[i].set(b[0]),  # one row
        lambda b, i: b.at[1:].set(1.0),  # of something else
        lambda b, i: b.at[:].set(2 * b),  # all of it
        lambda b, i: b.at[:, 0].set(b[:, 1]),  # one column
    ):
        assert without_shifted_writes(program(f)) is program(f) or (
            str(without_shifted_writes(program(f))) == str(program(f))
        )
    moved = program(lambda b, i: b.at[1:].set(b[:-1]))
    inner = program(
        lambda b, i: lax.cond(i > 0, lambda b: b.at[1:].set(b[:-1]), jnp.sin, b)
    )
    for changed in (moved, inner):
        assert "shifted_write" in str(without_shifted_writes(changed))
