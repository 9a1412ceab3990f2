"""`unvmap` against NumPy's reductions of whole batches."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

X = jnp.sin(jnp.arange(24.0)).reshape(2, 3, 4)
REDUCTIONS = {"any": jnp.any, "all": jnp.all, "max": jnp.max, "min": jnp.min}


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_reduces_over_every_vmap(op, jit):
    values = X > -0.9 if op in ("any", "all") else X
    expected = REDUCTIONS[op](values)
    f = lambda x: el.unvmap(x, op)
    assert f(values) == expected
    for mapped in (jax.vmap(f), jax.vmap(jax.vmap(f, 1)), el.Vmap(f)):
        found = jit(lambda x, mapped=mapped: mapped(x))(values)
        np.testing.assert_array_equal(found, jnp.full_like(found, expected))
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("op", ["any", "all", "max"])
def test_is_that_of_equinox(op):
    values = X if op == "max" else X > 0
    theirs = getattr(eqxi, f"unvmap_{op}")
    ours = lambda x: el.unvmap(x, op)
    nested = lambda f: jax.vmap(jax.vmap(f), out_axes=1)(values)
    np.testing.assert_array_equal(nested(ours), nested(theirs))


def test_the_result_is_not_mapped():
    found = jax.vmap(lambda x: el.unvmap(x > 0), out_axes=None)(X)
    assert found.shape == ()
    branch = lambda x: lax.cond(el.unvmap(x > 5), jnp.sin, jnp.cos, x)
    assert "stablehlo.case" in jax.jit(jax.vmap(branch)).lower(X).as_text()


def test_without_a_reduction():
    assert el.unvmap(X, "none") is not None
    np.testing.assert_array_equal(el.unvmap(X, "none"), X)
    same = jnp.broadcast_to(X[0], (5, 3, 4))
    found = jax.vmap(lambda x: el.unvmap(x, "none"), out_axes=None)(same)
    np.testing.assert_array_equal(found, X[0])


def test_is_a_constant_for_derivatives():
    f = lambda x: x * el.unvmap(x, "max")
    top = X.max()
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), jnp.full_like(X, top))
    mapped = jax.vmap(f)
    np.testing.assert_allclose(jax.jvp(mapped, (X,), (X,))[1], top * X)
    gradient = jax.vmap(jax.grad(lambda x: f(x).sum()))(X)
    np.testing.assert_allclose(gradient, jnp.full_like(X, top))


def test_in_a_scan():
    def step(carry, x):
        return carry + el.unvmap(x, "max"), None

    total = lambda x: lax.scan(step, 0.0, x)[0]
    expected = X.max((0, 2)).sum()
    np.testing.assert_allclose(jax.vmap(total)(X), [expected] * 2, rtol=1e-6)


def test_numbers():
    assert bool(el.unvmap(True))
    assert int(el.unvmap(np.int32(3), "min")) == 3
