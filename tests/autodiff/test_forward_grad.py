"""`ForwardGrad`: unbiased, and exact for the directions that it took."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.autodiff._directions import normal_directions

from ..asserts import assert_close

KEY = jax.random.key(0)
X = {"a": jnp.array([0.5, -1.0]), "n": jnp.arange(2), "b": jnp.array(2.0)}


def f(x, scale, *, power=2):
    value = jnp.sum(jnp.sin(x["a"]) ** power) * x["b"] * scale
    return value, {"scale": scale}


def test_is_the_mean_over_its_directions():
    key = jax.random.key(3)
    estimate = el.ForwardGrad(f, tangents=5, has_aux=True, return_value=True)
    exactly = el.Grad(f, has_aux=True)
    run = lambda x: (estimate(x, 3.0, key=key), exactly(x, 3.0)[0])
    ((value, aux), gradient), exact = jax.jit(run)(X)
    a, b = normal_directions(key, [X["a"], X["b"]], 5)
    slopes = a @ exact["a"] + b * exact["b"]
    np.testing.assert_allclose(gradient["a"], slopes @ a / 5, rtol=1e-4)
    np.testing.assert_allclose(gradient["b"], slopes @ b / 5, rtol=1e-4)
    assert gradient["n"] is None
    np.testing.assert_allclose(value, f(X, 3.0)[0], rtol=1e-6)
    assert aux["scale"] == 3.0


@pytest.mark.parametrize("argnums", [0, (0, 1), "scale"])
def test_is_unbiased(argnums):
    settings = dict(argnums=argnums, has_aux=True)
    estimate = el.ForwardGrad(f, tangents=20_000, **settings)
    exactly = el.Grad(f, **settings)
    run = lambda x, scale: (estimate(x, scale, key=KEY)[0], exactly(x, scale)[0])
    gradient, exact = jax.jit(run)(X, jnp.array(3.0))
    scale = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(exact)))
    assert_close(gradient, exact, rtol=1e-7, atol=0.05 * scale)


def test_is_unbiased_for_complex_arrays():
    w = jnp.array([0.5 + 1j, -1.0 + 0.2j])
    g = lambda w: jnp.sum(jnp.abs(w) ** 3) + jnp.real(w[0] * w[1])
    gradient = el.ForwardGrad(g, tangents=20_000)(w, key=jax.random.key(1))
    np.testing.assert_allclose(gradient, jax.grad(g)(w), atol=0.3)


def test_new_keys_give_new_directions():
    estimate = jax.jit(el.ForwardGrad(lambda x: jnp.sum(x**2)))
    one, other = (estimate(jnp.ones(3), key=jax.random.key(i)) for i in (0, 1))
    assert not jnp.allclose(one, other)
    # One direction gives a multiple of it.
    direction, *_ = normal_directions(jax.random.key(0), [jnp.ones(3)], 1)
    assert jnp.linalg.matrix_rank(jnp.stack([one, direction[0]])) == 1


def test_through_a_loop_and_with_an_old_key():
    scan = el.Scan(lambda h, x: (jnp.tanh(h * x), None))
    loss = lambda w: scan(w, jnp.linspace(0.5, 1.0, 4))[0]
    w = jnp.array(0.7)
    gradient = el.ForwardGrad(loss, tangents=5000)(w, key=jax.random.PRNGKey(0))
    np.testing.assert_allclose(gradient, jax.grad(loss)(w), rtol=0.1)


def test_directions_are_of_the_dtype_of_the_arrays():
    x = jnp.ones(2, jnp.float16)
    gradient = el.ForwardGrad(lambda x: jnp.sum(x**2))(x, key=jax.random.key(0))
    assert gradient.dtype == jnp.float16
