"""Rows of arrays stay slices under `vmap`, where all examples are at the same step."""

import re

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ...asserts import assert_close
from ...marks import slow

pytestmark = pytest.mark.sampled

# JAX makes a gather of a slice whose array is batched, and XLA transposes what a gather
# reads; and it makes a scatter of a write, which XLA has read what is there before.
GATHERS = re.compile(r"stablehlo\.(gather|scatter|dynamic_gather)\b")


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("twice", [False, slow(True)])
@pytest.mark.parametrize(
    "schedule",
    [el.Recursive(3), el.Chunked(4), el.Chunked(1, batch=4), el.Chunked(5, batch=5)],
    ids=repr,
)
def test_vmap_of_a_gradient(schedule, axis, twice):
    step = lambda h, x: (jnp.sin(h * x + jnp.sum(h)), h[0])

    def grad(schedule):
        def loss(h, xs):
            h, ys = el.Scan(step, schedule=schedule)(h, xs)
            return jnp.sum(h**2) + jnp.sum(ys)

        over = jax.vmap(jax.grad(loss, (0, 1)), (0, axis))
        return jax.jit(jax.vmap(over, (0, None)) if twice else over)

    h = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    xs = jnp.linspace(0.0, 1.0, 20)
    if axis is not None:
        xs = jnp.stack([xs, -xs], axis)
    args = (jnp.stack([h, 2 * h]) if twice else h), xs
    program = grad(schedule).lower(*args).as_text()
    assert GATHERS.search(program) is None
    assert_close(grad(schedule)(*args), grad(None)(*args))
