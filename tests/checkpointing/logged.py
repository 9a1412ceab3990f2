"""Functions whose backward rules log."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def logging(rule: Callable[[jax.Array, jax.Array], Any]) -> Any:
    """A sine whose backward rule logs what `rule` makes of `x` and its cotangent."""

    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    if hasattr(f, "defvjp_with_logs"):
        bwd = lambda x, ct: ((ct * jnp.cos(x),), rule(x, ct))
        f.defvjp_with_logs(lambda x: (jnp.sin(x), x), bwd)
    return f
