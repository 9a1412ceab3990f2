"""A primal that came along with its tangents is not run again."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

pytestmark = pytest.mark.sampled

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


@pytest.mark.parametrize("run", [looped, mapped])
def test_what_came_along_is_let_go(run):
    xs = jnp.ones((4, 3))
    out, _ = jax.jvp(lambda xs: run(jnp.sin, xs), (xs,), (xs,))
    kept = weakref.ref(out)
    del out
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("run", [looped, mapped])
def test_one_program_that_is_compiled_in_several_threads(run):
    xs = jnp.linspace(0, 1, 12).reshape(4, 3)
    push = lambda xs: jax.jvp(lambda xs: run(jnp.sin, xs), (xs,), (jnp.cos(xs),))
    program = jax.make_jaxpr(push)(xs)
    expected = push(xs)

    def compiled(_: int) -> Any:
        return jax.jit(lambda xs: jex.jaxpr_as_fun(program)(xs))(xs)

    with ThreadPoolExecutor(4) as threads:
        for outs in threads.map(compiled, range(8)):
            for found, right in zip(outs, expected, strict=True):
                np.testing.assert_allclose(found, right, rtol=1e-6)
