"""A primal that came along with its tangents is not run again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

NUMBERS = np.ones((3, 3), np.float32)


def looped(f: Any, xs: Any) -> Any:
    scan = el.CheckpointedScan(lambda h, x: (f(h) + x, None), base=2)
    return scan(jnp.zeros(3), xs)[0]


def mapped(f: Any, xs: Any) -> Any:
    return el.ChunkedVmap(f, 2)(xs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("run", [looped, mapped])
@pytest.mark.parametrize(
    "const",
    [NUMBERS, jnp.asarray(NUMBERS), np.float32(2), 2.0],
    ids=["numpy", "jax", "scalar", "number"],
)
def test_whatever_the_step_closes_over(run, const, compiled):
    calls: list[Any] = []

    def f(x: Any) -> Any:
        jax.debug.callback(calls.append, x)
        return jnp.dot(const, x)

    xs = jnp.ones((4, 3))
    push = lambda xs: jax.jvp(lambda xs: run(f, xs), (xs,), (xs,))
    jax.block_until_ready((jax.jit(push) if compiled else push)(xs))
    jax.effects_barrier()
    assert len(calls) == len(xs)
