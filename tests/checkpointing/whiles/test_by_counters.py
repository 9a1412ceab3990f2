"""While loops of which the way back reads counters alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ...marks import slow

pytestmark = pytest.mark.sampled

STEPS = 11
W = jnp.linspace(0.5, 1.5, 40)
X = jnp.array([0.3, -0.2])


def ours(cond, body, init):
    return el.CheckpointedWhileLoop(cond, body, checkpoints=3, max_steps=20)(init)


def plain(cond, body, init):
    keep = lambda new, old, runs: jnp.where(runs, new, old)
    step = lambda _, c: jax.tree.map(lambda a, b: keep(a, b, cond(c)), body(c), c)
    return lax.fori_loop(0, STEPS, step, init)


def loss(loop):
    """Products with weights that are read at counters, which go up and down."""

    def body(carry):
        i, row, back, x, rows = carry
        x = x * W[row] + W[back]
        return i + 1, row + 2, back - 1, x, rows.at[row].set(x)

    def run(x, row=1, count=STEPS):
        init = (jnp.int32(0), jnp.int32(row), jnp.int32(39), x, jnp.zeros((40, 2)))
        *_, x, rows = loop(lambda carry: carry[0] < count, body, init)
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(rows))

    return run


def assert_same(mode):
    found, expected = (jax.tree.leaves(mode(loss(loop))) for loop in (ours, plain))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def gradients(f):
    gradient = jax.jit(jax.grad(f))
    return [gradient(X, 1, count) for count in (0, 1, STEPS)]


def vmap_of_grad(f):
    """A counter that each example starts at another number."""
    return jax.jit(jax.vmap(jax.grad(f), (None, 0)))(X, jnp.array([0, 3]))


def grad_of_vmap(f):
    return jax.jit(
        jax.grad(lambda x: jnp.sum(jax.vmap(f, (None, 0))(x, jnp.array([0, 3]))))
    )(X)


def ends_apart(f):
    apart = jax.vmap(jax.grad(f), (None, None, 0))
    return jax.jit(apart)(X, 1, jnp.array([0, 3, STEPS]))


def hessian(f):
    return jax.jit(jax.hessian(f))(X)


def grad_of_grad(f):
    return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x))))(X)


MODES = [
    gradients,
    vmap_of_grad,
    slow(grad_of_vmap),
    slow(ends_apart),
    hessian,
    slow(grad_of_grad),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_modes(mode):
    assert_same(mode)


def test_no_step_is_run_again():
    ran = []

    def body(carry):
        jax.debug.callback(ran.append, carry[0])
        return carry[0] + 1, carry[1] * W[carry[0]]

    @jax.jit
    def gradient(n):
        run = lambda x: ours(lambda carry: carry[0] < n, body, (0, x))[1]
        return jax.grad(run)(0.5)

    gradient(STEPS).block_until_ready()
    jax.effects_barrier()
    assert len(ran) == 2 * STEPS


def test_there_is_one_loop_each_way():
    program = jax.jit(jax.grad(loss(ours))).lower(X).as_text()
    assert program.count("stablehlo.while") == 2
