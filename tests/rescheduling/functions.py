"""Functions of a library, as it were: loops of `jax.lax` that nobody can edit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

W, XS = jnp.float32(0.9), jnp.linspace(0.1, 1.0, 24)


def simulate(w: Any, xs: Any) -> Any:
    """A scan of as many steps as `xs` has entries."""
    step = lambda h, x: (jnp.tanh(w * h + x), h)
    h, ys = lax.scan(step, jnp.ones_like(w), xs)
    return h + jnp.sum(ys)


def root(a: Any) -> Any:
    """Newton's iteration towards the square root."""
    is_far = lambda x: jnp.abs(x * x - a) > 1e-5 * a
    return lax.while_loop(is_far, lambda x: (x + a / x) / 2, jnp.ones_like(a))


def nested(w: Any, xs: Any) -> Any:
    """A scan of 4 steps in each step of another one."""
    inner = lambda h, _: (jnp.sin(w * h), None)
    outer = lambda h, x: (lax.scan(inner, h + x, length=4)[0], None)
    return jnp.sum(lax.scan(outer, jnp.ones_like(w), xs)[0])


class Counted:
    """A scan that counts its evaluations, one that gradients run again too."""

    def __init__(self) -> None:
        self.evaluations = 0

    def __call__(self, w: Any, xs: Any) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, None]:
            one = jax.pure_callback(
                self._note,
                jax.typeof(h),
                lax.stop_gradient(h),
                vmap_method="legacy_vectorized",
            )
            return jnp.tanh(one * w * h + x), None

        return lax.scan(step, jnp.ones_like(w), xs)[0]

    def _note(self, h: Any) -> Any:
        self.evaluations += 1
        return np.ones_like(h)

    def in_a_run(self, f: Callable[..., Any], *args: Any) -> int:
        """How many there are while a function is run."""
        self.evaluations = 0
        jax.block_until_ready(jax.jit(f)(*args))
        return self.evaluations
