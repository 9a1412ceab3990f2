"""What XLA allocates for a gradient, beside its inputs and outputs."""

import jax
import jax.numpy as jnp

import eqloop as el


def gradient(schedule, policy=None):
    """The gradient of a loss of the last carry in `f`, `init` and `xs`."""

    def loss(f, init, xs):
        carry, _ = el.Scan(f, schedule=schedule, policy=policy)(init, xs)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(carry))

    return jax.grad(loss, argnums=(0, 1, 2))


def temp_bytes(function, *args):
    program = jax.jit(lambda *args: function(*args)).lower(*args).compile()
    return program.memory_analysis().temp_size_in_bytes
