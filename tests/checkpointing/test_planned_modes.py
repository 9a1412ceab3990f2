"""Schedules that plan by cost, or store elsewhere, in several modes of differentiation.

What they have in common with other schedules is tested in every mode elsewhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

SCHEDULES = [el.Budget("3KiB"), el.Budget("64KiB"), el.Offload(el.Binomial(3))]

W = 0.9 * jnp.eye(4) + 0.05
H = jnp.linspace(0.5, 1.5, 4)
XS = jnp.linspace(0, 1, 60).reshape(15, 4)


def loss(schedule):
    def run(w, h, xs):
        step = lambda h, x: (jnp.tanh(w @ h + x), None)
        return jnp.sum(el.Scan(step, schedule=schedule)(h, xs)[0] ** 2)

    return run


def hessian(f):
    return jax.hessian(f, 1)(W, H, XS)


def reverse_over_reverse(f):
    return jax.jacrev(jax.grad(f, 1), 0)(W, H, XS)


def vmap_of_grad(f):
    return jax.vmap(jax.grad(f, 1), (None, 0, None))(W, jnp.stack([H, 2 * H]), XS)


def grad_of_vmap(f):
    batched = jax.vmap(f, (None, 0, None))
    return jax.grad(lambda w: batched(w, jnp.stack([H, 2 * H]), XS).sum())(W)


def in_remat(f):
    return jax.grad(jax.checkpoint(f))(W, H, XS)


def in_shard_map(f):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    of_shard = lambda w, h, xs: jax.lax.psum(f(w, h[0], xs), "i")
    specs = (PartitionSpec(), PartitionSpec("i"), PartitionSpec())
    total = jax.shard_map(
        of_shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
    )
    return jax.jit(jax.grad(total))(W, jnp.stack([H, 2 * H]), XS)


MODES = [
    hessian,
    reverse_over_reverse,
    vmap_of_grad,
    grad_of_vmap,
    in_remat,
    in_shard_map,
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_derivatives_agree(mode):
    expected = mode(loss(el.StoreAll()))
    for schedule in SCHEDULES:
        actual = mode(loss(schedule))
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)
