"""The iteration that an error names is one, however many steps are taken at once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..marks import slow
from ..schedules import EVERY_KIND
from ..weights import without_key

LENGTH, AT = 24, 17


def step(h, x):
    h = jnp.tanh(h + 1.0)
    return h, jnp.sqrt(x * h)  # whose derivative is infinite where `x` is 0


@pytest.mark.parametrize("reverse", [False, slow(True)])
@pytest.mark.parametrize(
    "schedule",
    [
        None,
        *map(slow, EVERY_KIND),
        slow(el.Recursive(4, batch=4)),
        el.Chunked(8, batch=8),
        slow(el.Chunked(LENGTH, batch=5)),
        slow(el.Budget(20_000)),
    ],
    ids=str,
)
def test_of_one_step(schedule, reverse):
    xs = jnp.ones(LENGTH).at[AT].set(0.0)

    def loss(h):
        scan = el.CheckpointedScan(step, schedule=schedule, reverse=reverse)
        return jnp.sum(scan(h, xs)[1])

    gradient = el.Jit(jax.grad(el.DebugNonFinite(loss)))
    with pytest.raises(el.NonFiniteError) as info:
        gradient(jnp.ones(3))
    assert f"in: iteration {AT} of CheckpointedScan" in str(info.value)


def test_of_a_batch_of_examples():
    cell = without_key(eqx.nn.GRUCell, 2, 8)
    xs = jnp.ones((4, LENGTH, 2))

    def loss(cell, weights):
        def body(h, now):
            x, weight = now
            h = cell(x, h)
            return h, jnp.sqrt(weight * h[0] ** 2)

        run = lambda xs: el.CheckpointedScan(body)(jnp.zeros(8), (xs, weights))[1]
        return jnp.sum(jax.vmap(run)(xs))

    gradient = el.Jit(el.Grad(el.DebugNonFinite(loss)))
    gradient(cell, jnp.ones(LENGTH))
    with pytest.raises(el.NonFiniteError, match=f"in: iteration {AT} of"):
        gradient(cell, jnp.ones(LENGTH).at[AT].set(0.0))
