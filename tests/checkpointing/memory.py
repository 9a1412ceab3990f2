"""A gradient, for the memory that it takes."""

import jax
import jax.numpy as jnp

import eqloop as el


def gradient(schedule, policy=None):
    """The gradient of a loss of the last carry in `f`, `init` and `xs`."""

    def loss(f, init, xs):
        carry, _ = el.Scan(f, schedule=schedule, policy=policy)(init, xs)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(carry))

    return jax.grad(loss, argnums=(0, 1, 2))
