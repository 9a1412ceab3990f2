"""Functions of JAX that have loops in them: those with rules of their own keep them."""

import jax
import jax.experimental.ode
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close
from ..marks import slow

X = jnp.array([0.3, 0.5, 0.9])
KEY = jax.random.key(0)


def conjugate_gradients(x):
    times = lambda v: v * (3 + jnp.sum(x) ** 2) + 0.1 * jnp.sum(v)
    return jax.scipy.sparse.linalg.cg(times, x)[0]


def custom_root(x):
    def solve(f, z):
        far = lambda z: jnp.any(jnp.abs(f(z)) > 1e-5)
        return lax.while_loop(far, lambda z: z - f(z) / (3 * z**2 + 1), z)

    by_slope = lambda g, y: y / g(jnp.ones_like(y))
    return lax.custom_root(lambda z: z**3 + z - x, x, solve, by_slope)


def ode(x):
    return jax.experimental.ode.odeint(lambda y, t: -y * x, x, jnp.arange(3.0))


FUNCTIONS = {
    "cg": conjugate_gradients,
    "custom_root": custom_root,
    "poisson": lambda x: x * jax.random.poisson(KEY, jnp.exp(x)).astype(x.dtype),
    "gamma": lambda x: jax.random.gamma(KEY, jnp.exp(x)),
    "betainc": lambda x: jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(x)),
    "odeint": ode,
}
SLOW = ("gamma", "betainc", "odeint")


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in FUNCTIONS])
def test_gradients_are_those_of_the_function(name):
    f = FUNCTIONS[name]
    total = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))
    frugal = el.Reschedule(f, el.Recursive(2), whiles=3)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found, expected = (jax.jit(jax.grad(total(g)))(X) for g in (frugal, f))
    assert_close(found, expected)
