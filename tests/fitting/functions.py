"""Small functions to fit, and a budget that takes some effort.

All take weights and a batch, and return a number.
"""

from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

# The gradient of `layers` takes 16 KiB if everything is stored.
TIGHT = 10_500

W = jnp.eye(8) / 2 + jnp.linspace(-0.3, 0.3, 64).reshape(8, 8)
X = jnp.linspace(-1, 1, 32 * 8).reshape(32, 8)


def layers(w: Any, x: Any) -> Any:
    """Five layers, written out one by one."""
    for _ in range(5):
        x = jnp.tanh(jnp.sin(x @ w) * x)
    return jnp.sum(x**2)


def over_time(w: Any, x: Any) -> Any:
    """A loop over the rows."""
    step = lambda h, u: (jnp.tanh(jnp.sin(h @ w) + u), h[:2])
    h, ys = el.Scan(step)(x[0], x)
    return jnp.sum(h**2) + jnp.sum(ys)


def mixed(w: Any, x: Any) -> Any:
    """Layers before a loop, and something after it."""
    x = jnp.tanh(jnp.sin(x @ w) * x)
    return over_time(w, jnp.tanh(jnp.sin(x @ w) * x))


def gradient(f: Any) -> Any:
    """The value of a function, and its gradient in both arguments, compiled."""
    return jax.jit(jax.value_and_grad(f, (0, 1)))
