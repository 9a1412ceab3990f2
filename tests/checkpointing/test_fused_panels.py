"""Kernels of recurrent cells: matrices in shared memory, and products by tensor cores.

They are run by the interpreter that Pallas's backend Mosaic GPU has, on a CPU.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._compat import HAS_MOSAIC_GPU
from eqloop.checkpointing.fused._row_programs import Settings

pytestmark = pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="a later backend")

ROWS, STEPS, UNITS = 66, 5, 32
FUSED = el.Fused(2, interpret=True)


@pytest.fixture(autouse=True)
def _panels(monkeypatch):
    monkeypatch.setattr(
        Settings.__init__, "__defaults__", (None, False, None, True, True)
    )


def gru(inputs, dtype):
    cell = eqx.nn.GRUCell(inputs, UNITS, key=jax.random.key(0), dtype=dtype)
    return cell, lambda cell, h, x: (cell(x, h),) * 2


def lstm(inputs, dtype):
    cell = eqx.nn.LSTMCell(inputs, UNITS, key=jax.random.key(0), dtype=dtype)

    def step(cell, state, x):
        state = cell(x, state)
        return state, state[0]

    return cell, step


def normalised(inputs, dtype):
    """A minimal cell of two layers, of which the inner one is normalised."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (UNITS, inputs + UNITS), (UNITS, UNITS), (UNITS,)
    weights = [
        (jax.random.normal(k, s) * 0.3).astype(dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]

    def step(weights, h, x):
        inner, outer, scale = weights
        y = inner @ jnp.concatenate([x, h])
        y = y - jnp.mean(y)
        y = y * lax.rsqrt(jnp.mean(y**2) + 1e-3) * scale
        h = h + 0.5 * (jnp.tanh(outer @ jax.nn.relu(y)) - h)
        return h, None

    return weights, step


def start_of(name, dtype):
    h = (jax.random.normal(jax.random.key(1), (ROWS, UNITS)) * 0.5).astype(dtype)
    return (h, h * 0.3) if name is lstm else h


def all_of(name, inputs, dtype, schedule, reverse=False):
    """The values and the gradient of a loop."""
    cell, step = name(inputs, dtype)
    xs = jax.random.normal(jax.random.key(2), (ROWS, STEPS, inputs)).astype(dtype)

    def run(cell, h, xs):
        step_of = functools.partial(step, cell)
        return el.Scan(step_of, reverse=reverse, schedule=schedule)(h, xs)

    def loss(cell, h, xs):
        made = jax.vmap(run, (None, 0, 0))(cell, h, xs)
        weigh = lambda x: jnp.sum(jnp.cos(jnp.arange(x.size)).reshape(x.shape) * x)
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(made)]
        return sum(map(weigh, leaves)), made

    of = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, made), gradient = jax.jit(of)(cell, start_of(name, dtype), xs)
    return made, gradient


def check(name, inputs, dtype="float32", reverse=False, most=3e-4):
    every = [
        jax.tree.leaves(all_of(name, inputs, dtype, schedule, reverse))
        for schedule in (FUSED, el.StoreAll())
    ]
    for a, b in zip(*every, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.max(np.abs(a - b)) <= most * max(np.max(np.abs(b)), 1e-3)


def test_a_gru_is_what_it_is_without_a_kernel():
    check(gru, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", [lstm, normalised])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_are_other_cells(name, dtype):
    check(name, 16, dtype, most=3e-4 if dtype == "float32" else 3e-2)
