"""`Vjp` and `Jvp`, beside JAX's."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

from ..asserts import assert_raises
from ..weights import without_key

W, X = jnp.array([[1.0, 2.0], [0.5, -1.0]]), jnp.array([0.3, 0.4])


def f(w, x, name="out", *, power=2):
    return {name: jnp.tanh(w @ x) ** power, "n": jnp.arange(2), "f": jnp.tanh}


def test_vjp():
    value, pull = el.Vjp(f)(W, X, "y", power=3)
    expected, pull_jax = jax.vjp(lambda w, x: f(w, x, power=3)["out"], W, X)
    np.testing.assert_allclose(value["y"], expected, rtol=1e-6)
    assert value["f"] is jnp.tanh
    cts = pull({"y": jnp.array([1.0, -2.0]), "n": None, "f": None})
    assert cts[2] is None
    for got, wanted in zip(cts, pull_jax(jnp.array([1.0, -2.0])), strict=False):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_vjp_with_aux_under_jit():
    @eqx.filter_jit
    def run(w, x):
        value, pull, aux = el.Vjp(lambda w, x: (w @ x, x), has_aux=True)(w, x)
        return value, pull(jnp.ones(2)), aux

    value, (ct_w, ct_x), aux = run(W, X)
    np.testing.assert_allclose(value, W @ X, rtol=1e-6)
    np.testing.assert_allclose(ct_w, jnp.outer(jnp.ones(2), X), rtol=1e-6)
    np.testing.assert_allclose(ct_x, W.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(aux, X)


def test_jvp():
    tangents = (jnp.ones((2, 2)), None, None)
    value, tangent = el.Jvp(f)((W, X, "y"), tangents, power=3)
    expected = jax.jvp(lambda w: f(w, X, power=3)["out"], (W,), (jnp.ones((2, 2)),))
    np.testing.assert_allclose(value["y"], expected[0], rtol=1e-6)
    np.testing.assert_allclose(tangent["y"], expected[1], rtol=1e-5)
    assert tangent["n"] is None
    assert tangent["f"] is None


def test_jvp_moves_numbers():
    value, tangent = el.Jvp(lambda x, y: x * y)((2.0, X), (1.0, None))
    np.testing.assert_allclose(value, 2 * X)
    np.testing.assert_allclose(tangent, X)


def test_their_functions_may_be_modules_and_methods():
    linear = without_key(eqx.nn.Linear, 2, 2)
    _, pull = el.Vjp(linear)(X)
    np.testing.assert_allclose(pull(jnp.ones(2))[0], linear.weight.sum(0), rtol=1e-6)
    _, tangent = el.Jvp(linear)((X,), (X,))
    np.testing.assert_allclose(tangent, linear.weight @ X, rtol=1e-6)


def test_cotangents_that_do_not_fit():
    _, pull = el.Vjp(lambda x: {"a": (x, 3)})(X)
    for ct in (X[0], jnp.ones(2, int)):
        assert_raises(
            lambda ct=ct: pull({"a": (ct, None)}),
            f"ValueError: … got {jax.typeof(ct).str_short()} … expected float32[2]",
        )
    wrong = {"out['a']": X, "out['a'][1]": (X, X), "out['a'][0]": (None, None)}
    for place, cts in wrong.items():
        assert_raises(
            lambda cts=cts: pull({"a": cts}),
            f"ValueError: … tree structure … {place} was",
        )
    np.testing.assert_array_equal(pull({"a": (X, None)})[0], X)


def test_pull_goes_through_transforms():
    rows = jnp.stack([X, 2 * X])
    pulls = jax.vmap(lambda x: el.Vjp(jnp.sin)(x)[1])(rows)
    cts = jax.vmap(lambda pull, ct: pull(ct)[0])(pulls, rows)
    np.testing.assert_allclose(cts, rows * jnp.cos(rows), rtol=1e-6)
    _, pull = el.Vjp(jnp.sin)(X)
    np.testing.assert_allclose(
        jax.jit(lambda pull, ct: pull(ct)[0])(pull, X), X * jnp.cos(X), rtol=1e-6
    )
