"""`Remat`: the same numbers in every mode, from fewer residuals."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow_if
from ..weights import without_key

pytestmark = pytest.mark.sampled


def deep(x):
    for _ in range(4):
        x = jnp.sin(x) * jnp.cos(x)
    return x


POINT = jnp.linspace(0.1, 1.0, 3)
TANGENT = jnp.ones(3)
MODES = {
    "primal": lambda f: f(POINT),
    "jvp": lambda f: jax.jvp(f, (POINT,), (TANGENT,)),
    "linearize": lambda f: jax.linearize(f, POINT)[1](TANGENT),
    "vjp": lambda f: jax.vjp(f, POINT)[1](TANGENT),
    "jacfwd": lambda f: jax.jacfwd(f)(POINT),
    "jacrev": lambda f: jax.jacrev(f)(POINT),
    "hessian": lambda f: jax.hessian(f)(POINT),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f))(POINT),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f))(POINT),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(POINT),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(POINT),
    "in scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0].sum()
    )(POINT),
    "in cond": lambda f: jax.grad(
        lambda x: jax.lax.cond(x[0] > 0, f, jnp.sin, x).sum()
    )(POINT),
    "in itself": lambda f: jax.grad(lambda x: el.Remat(f)(f(x)).sum())(POINT),
}


# Whose parts are tried in the others.
SLOW = {"hessian", "reverse over forward"}


@pytest.mark.parametrize("mode", slow_if(SLOW.__contains__, MODES))
def test_is_f_in_every_mode(mode):
    derive = MODES[mode]
    remats = el.Remat(deep), el.Remat(deep, policy="save_everything")
    expected, *others = jax.jit(lambda: [derive(f) for f in (deep, *remats)])()
    for found in others:
        assert_close(found, expected, rtol=1e-5, atol=0)


def test_checkpoint_is_another_name_for_it():
    assert el.Checkpoint is el.Remat


def residuals(f, *args):
    """The shapes of what is kept for the backward pass, arguments included."""
    _, pull = jax.eval_shape(lambda *args: jax.vjp(f, *args), *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull))


def test_only_arguments_are_residuals():
    assert len(residuals(deep, POINT)) > 4
    assert residuals(el.Remat(deep), POINT) == [(3,)]


def test_a_policy_adds_to_the_residuals():
    def f(x):
        return deep(el.name(deep(x)[:2], "half"))

    assert residuals(el.Remat(f), POINT) == [(3,)]
    keeping = el.Remat(f, policy=el.policies.save_names("half"))
    assert residuals(keeping, POINT) == [(2,), (3,)]


def products(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x


def test_a_gradient_takes_less_memory():
    def temporary(f):
        # As the body of a loop, which XLA cannot schedule in another order.
        step = lambda w: lambda x, _: (f(w, x), None)
        loss = lambda w, x: jax.lax.scan(step(w), x, None, 4)[0].sum()
        return temp_bytes(jax.grad(loss), (32, 32), (64, 32))

    assert temporary(el.Remat(products)) < temporary(products) / 2


def test_f_is_evaluated_once_more_when_differentiated():
    def count(f):
        derivative = jax.value_and_grad(lambda w: f(w, w).sum())
        return jax.jit(derivative).lower(jnp.eye(3)).as_text().count("dot_general")

    plain = count(products)
    assert count(el.Remat(products)) == plain + 8
    assert count(el.Remat(products, policy="save_dots")) == plain


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_prevent_cse_puts_up_a_barrier(prevent_cse):
    f = el.Remat(deep, prevent_cse=prevent_cse)
    text = jax.jit(jax.grad(lambda x: f(x).sum())).lower(POINT).as_text()
    assert ("optimization_barrier" in text) == prevent_cse


class Layer(eqx.Module):
    weight: jax.Array
    name: str

    @el.Remat(policy="save_dots")
    def method(self, x, *, scale=1.0):
        return scale * jnp.sin(self.weight @ x), self.name


def test_is_a_module_whose_arrays_are_those_of_f():
    layer = without_key(eqx.nn.Linear, 3, 2)
    remat = el.Remat(layer)
    assert jax.tree.leaves(remat) == jax.tree.leaves(layer)
    loss = lambda f: jnp.sum(jnp.sin(f(POINT)))
    grads = eqx.filter_grad(loss)(remat)
    expected = eqx.filter_grad(loss)(layer)
    np.testing.assert_allclose(grads.f.weight, expected.weight, rtol=1e-6)
    np.testing.assert_allclose(grads.f.bias, expected.bias, rtol=1e-6)


def test_as_a_decorator_of_a_method():
    layer = Layer(jnp.eye(3), "first")
    y, name = layer.method(POINT, scale=2.0)
    np.testing.assert_allclose(y, 2 * jnp.sin(POINT), rtol=1e-6)
    assert name == "first"
    grads = eqx.filter_grad(lambda layer: layer.method(POINT)[0].sum())(layer)
    np.testing.assert_allclose(
        grads.weight, jnp.outer(jnp.cos(POINT), POINT), rtol=1e-6
    )


def test_as_a_decorator_of_a_function():
    @el.Remat(prevent_cse=False)
    def f(x):
        return deep(x)

    assert isinstance(f, el.Remat)
    assert not f.prevent_cse
    assert residuals(f, POINT) == [(3,)]


def test_static_leaves_reach_f_and_come_back():
    seen = []

    def f(tree, flag, *, activation):
        seen.append((tree["name"], tree["none"], flag))
        return {"y": activation(tree["x"]), "name": tree["name"], "f": activation}

    out = el.Remat(f)({"x": POINT, "name": "a", "none": None}, 3, activation=jnp.sin)
    assert seen == [("a", None, 3)]
    assert out["name"] == "a"
    assert out["f"] is jnp.sin
    np.testing.assert_allclose(out["y"], jnp.sin(POINT))


def test_leaves_of_every_dtype():
    def f(x, i, flag, key, z):
        y = jnp.where(flag, x, -x) * i.astype(float) + jax.random.normal(key)
        return y, i + 1, key, z * 2

    args = (
        POINT,
        jnp.arange(3),
        jnp.array([True, False, True]),
        jax.random.key(1),
        jnp.ones(3, jnp.complex64),
    )
    out, expected = el.Remat(f)(*args), f(*args)
    np.testing.assert_allclose(out[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(out[1], expected[1])
    assert jax.random.key_data(out[2]).tolist() == [0, 1]
    assert out[3].dtype == jnp.complex64
    grad = jax.grad(lambda x: el.Remat(f)(x, *args[1:])[0].sum())(POINT)
    np.testing.assert_allclose(grad, jnp.array([0.0, -1.0, 2.0]))


def test_closed_over_arrays_are_differentiated():
    grad = jax.grad(lambda w: el.Remat(lambda x: jnp.sin(w * x).sum())(POINT))
    np.testing.assert_allclose(
        grad(2.0), jnp.sum(POINT * jnp.cos(2 * POINT)), rtol=1e-6
    )


@pytest.mark.parametrize("argnums", [1, -1, (1,), [np.int64(1)]])
def test_static_argnums_reach_f_as_they_are(argnums):
    def f(x, indices):
        assert isinstance(indices, np.ndarray)
        return x[tuple(indices)]

    f = el.Remat(f, static_argnums=argnums)
    assert f(POINT, np.array([1])) == POINT[1]
    assert jax.jit(lambda x: f(x, np.array([2])))(POINT) == POINT[2]


def test_numpy_arrays_are_arrays_otherwise():
    @el.Remat
    def f(x):
        assert isinstance(x, jax.Array)
        return x

    f(np.ones(3))


def test_the_policy_can_be_edited_and_shows():
    remat = el.Remat(jnp.sin)
    edited = eqx.tree_at(
        lambda f: f.policy, remat, el.policies.save_dots, is_leaf=lambda x: x is None
    )
    assert edited == el.Remat(jnp.sin, policy=el.policies.save_dots)
    assert "policy=el.policies.save_dots" in repr(edited)
    assert edited != remat


@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        (
            lambda: el.Remat(deep, static_argnums=(0, 2))(POINT),
            ValueError,
            "has 2, but f was called with 1 positional arguments",
        ),
        (lambda: el.Remat(deep, static_argnums=-2)(POINT), ValueError, "has -2"),
        (lambda: el.Remat(polcy=None), TypeError, "no setting 'polcy'"),
    ],
)
def test_wrong_calls(call, error, part):
    with pytest.raises(error) as caught:
        call()
    assert part in str(caught.value)
