"""Every derivative, with every combination of its settings, beside JAX."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqloop as el

from ..asserts import assert_close

pytestmark = pytest.mark.sampled

X = {"a": jnp.array([0.3, -0.7]), "b": jnp.array(1.5)}
Y = jnp.array([0.2, 0.9, -0.4])
Z = jnp.array([[0.5], [2.0]])
ARGNUMS = [0, -1, (1,), (2, 0), (0, -2), "z", ("y", "x"), ("x", 1)]
FLAGS = list(itertools.product([False, True], [False, True]))
# Each way to say an argument, and each pair of flags twice; and all of them, slowly.
SOME = [(a, *flags) for a, flags in zip(ARGNUMS, 2 * FLAGS, strict=True)]
ALL = [(a, *flags) for a, flags in itertools.product(ARGNUMS, FLAGS)]
POSITIONS = {"x": 0, "y": 1, "z": 2}


def vector(x, y, z):
    p = jnp.sin(x["a"] * jnp.sum(y**2)) + x["b"] * z[:, 0]
    return {"p": p, "q": jnp.prod(y) * x["b"] ** 3}


def scalar(x, y, z):
    out = vector(x, y, z)
    return jnp.sum(out["p"] ** 2) + out["q"]


def vector_grad(f, argnums):
    return jax.grad(lambda *args: sum(map(jnp.sum, f(*args).values())), argnums)


DERIVATIVES = {
    el.Grad: (scalar, jax.grad),
    el.VectorGrad: (vector, vector_grad),
    el.JacRev: (vector, jax.jacrev),
    el.JacFwd: (vector, jax.jacfwd),
    el.Jacobian: (vector, jax.jacrev),
    el.Hessian: (scalar, jax.hessian),
}
cases = pytest.mark.parametrize("transform", DERIVATIVES, ids=lambda t: t.__name__)


def positions(argnums):
    """The same as JAX has them."""
    several = argnums if isinstance(argnums, tuple) else (argnums,)
    found = tuple(POSITIONS.get(a, a) for a in several)
    return found if isinstance(argnums, tuple) else found[0]


def with_aux(f):
    return lambda x, y, z, name="aux": (f(x, y, z), {name: z, "i": jnp.arange(3)})


@pytest.mark.parametrize(
    "combinations",
    [SOME, pytest.param(ALL, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@cases
def test_combinations_of_settings(transform, combinations):
    f, of_jax = DERIVATIVES[transform]

    def derivative(argnums, has_aux, return_value):
        function = with_aux(f) if has_aux else f
        flags = dict(has_aux=has_aux, return_value=return_value)
        return transform(function, argnums=argnums, **flags)

    @jax.jit
    def both(*args):
        got = [derivative(*case)(*args) for case in combinations]
        expected = [of_jax(f, argnums=positions(a))(*args) for a, _, _ in combinations]
        return got, expected

    value, aux = f(X, Y, Z), {"aux": Z, "i": jnp.arange(3)}
    for case, got, expected in zip(combinations, *both(X, Y, Z), strict=True):
        _, has_aux, return_value = case
        if return_value:
            expected = ((value, aux) if has_aux else value), expected
        elif has_aux:
            expected = expected, aux
        assert_close(got, expected)


@cases
def test_arguments_given_by_name_have_their_position(transform):
    f, of_jax = DERIVATIVES[transform]

    @jax.jit
    def run(x, y, z):
        by_position = transform(f, argnums=1)(x, z=z, y=y)
        return by_position, of_jax(f, argnums=1)(x, y, z)

    assert_close(*run(X, Y, Z))


class Layer(eqx.Module):
    weight: jax.Array
    count: jax.Array
    rate: float
    name: str = eqx.field(static=True)

    def __call__(self, x):
        return jnp.tanh(self.weight @ x) * self.rate


LAYER = Layer(jnp.ones((2, 3)) / 3, jnp.arange(2), 0.5, "layer")


@cases
def test_leaves_that_are_not_differentiated_have_none(transform):
    f, of_jax = DERIVATIVES[transform]
    is_scalar = f is scalar

    def call(layer, x, options):
        assert layer.name == "layer"
        assert options == {"flag": "on", "n": 3}
        y = layer(x)
        return jnp.sum(y**3) if is_scalar else {"p": y**2, "q": jnp.sum(y)}

    options = {"flag": "on", "n": 3}
    derivative = transform(call, argnums=("layer", "options"))
    derivative = eqx.filter_jit(derivative)(LAYER, Y, options)
    of_weight = lambda w: call(Layer(w, LAYER.count, 0.5, "layer"), Y, options)
    expected = jax.jit(of_jax(of_weight, argnums=0))(LAYER.weight)
    is_layer = lambda node: isinstance(node, Layer)
    layers = [n for n in jax.tree.leaves(derivative, is_leaf=is_layer) if is_layer(n)]
    assert all(n.count is None and n.rate is None for n in layers)
    assert all(n.name == "layer" for n in layers)
    assert_close(jax.tree.leaves(derivative), jax.tree.leaves(expected))


LEAVES = st.sampled_from([Y, np.float32([2.0, 3.0]), jnp.arange(2), 1.5, None, "s"])
TREES = st.recursive(
    LEAVES,
    lambda t: st.lists(t, max_size=3) | st.dictionaries(st.sampled_from("ab"), t),
)


@given(TREES)
def test_any_tree(tree):
    arrays = eqx.filter(tree, eqx.is_inexact_array)

    def f(parts):
        leaves = jax.tree.leaves(eqx.filter(parts[1], eqx.is_inexact_array))
        return sum(jnp.sum(x**2) for x in leaves) + jnp.sum(parts[0])

    gradient = el.Grad(f)([Y, tree])
    assert_close(gradient, [jnp.ones(3), jax.tree.map(lambda x: 2 * x, arrays)])


def test_a_layer_without_parameters_has_a_derivative_without_leaves():
    gradient = el.Grad(lambda layer, x: jnp.sum(layer(x)))(eqx.nn.Lambda(jnp.tanh), Y)
    assert isinstance(gradient, eqx.nn.Lambda)
    assert gradient.fn is None


def test_a_function_that_is_a_module_is_not_differentiated():
    gradient = el.VectorGrad(LAYER)(Y)
    assert_close(gradient, jax.grad(lambda x: jnp.sum(LAYER(x)))(Y))


class Model(eqx.Module):
    layer: Layer

    @el.Grad(return_value=True)
    def loss(self, x):
        return jnp.sum(self.layer(x))


def test_as_a_method_it_differentiates_by_what_follows_self():
    value, gradient = Model(LAYER).loss(Y)
    assert_close(gradient, jax.grad(lambda x: jnp.sum(LAYER(x)))(Y))
    np.testing.assert_allclose(value, jnp.sum(LAYER(Y)), rtol=1e-6)


def test_as_a_decorator_under_jit_and_vmap():
    @el.Grad(argnums="scale")
    def f(x, *, scale):
        return jnp.sum(jnp.sin(scale * x))

    xs, scales = jnp.ones((4, 3)), jnp.arange(4.0)
    run = eqx.filter_jit(jax.vmap(lambda x, scale: f(x, scale=scale)))
    expected = jax.vmap(lambda x, s: jnp.sum(jnp.cos(s * x) * x))(xs, scales)
    np.testing.assert_allclose(run(xs, scales), expected, rtol=1e-6)


@pytest.mark.usefixtures("either_width")
def test_derivatives_of_derivatives():
    f = lambda x: jnp.sum(x**4)
    twice, thrice = el.JacFwd(el.Grad(f)), el.JacRev(el.Hessian(f, chunk_size=2))
    of_jax = jax.hessian(f), jax.jacrev(jax.hessian(f))
    both = jax.jit(lambda x: ([twice(x), thrice(x)], [g(x) for g in of_jax]))
    assert_close(*both(Y))


@pytest.mark.usefixtures("either_width")
def test_numbers_and_numpy_arrays():
    np.testing.assert_allclose(el.Grad(jnp.sin)(0.5), jnp.cos(0.5))
    gradient = el.Grad(lambda x: jnp.sum(x**2))(np.ones(2, np.float32))
    assert isinstance(gradient, jax.Array)
    # A value that is a number does not depend on anything.
    np.testing.assert_array_equal(el.Grad(lambda x: 1.0)(Y), jnp.zeros(3))
    np.testing.assert_array_equal(el.JacRev(lambda x: (1.0, x[0]))(Y)[0], jnp.zeros(3))


def test_annotations_of_the_function_hold():
    from jaxtyping import Array, Float

    def f(x: Float[Array, "2"]) -> Float[Array, ""]:
        return jnp.sum(x)

    with pytest.raises(TypeError, match="Float"):
        el.Grad(f)(Y)


def test_the_signature_is_that_of_the_function():
    import inspect

    assert list(inspect.signature(el.Grad(scalar)).parameters) == ["x", "y", "z"]
    assert list(inspect.signature(el.SofoGrad(scalar)).parameters) == [*"xyz", "key"]


# Complex arrays, as JAX has them.

W = jnp.array([0.5 + 1j, -2.0 + 0.3j])


def test_complex_arguments_of_a_real_value():
    f = lambda w: jnp.sum(jnp.abs(w) ** 3) + jnp.real(w[0] * w[1])
    np.testing.assert_allclose(el.Grad(f)(W), jax.grad(f)(W), rtol=1e-5)
    g = lambda w: jnp.real(w * w[0])
    expected = jax.jacrev(g)(W)
    np.testing.assert_allclose(el.JacRev(g)(W), expected, rtol=1e-5)
    np.testing.assert_allclose(el.Jacobian(g)(W), expected, rtol=1e-5)


def test_complex_values_of_real_arguments():
    f = lambda x: jnp.exp(1j * x.astype(complex))[:2]
    expected = jax.jacfwd(f)(Y)
    np.testing.assert_allclose(el.JacFwd(f)(Y), expected, rtol=1e-5)
    np.testing.assert_allclose(el.Jacobian(f)(Y), expected, rtol=1e-5)


def test_holomorphic_functions():
    f, g = lambda w: jnp.prod(w) ** 2, lambda w: w**3 * w[0]
    pairs = [(el.Grad, jax.grad, f), (el.Hessian, jax.hessian, f)]
    pairs += [(el.JacRev, jax.jacrev, g), (el.JacFwd, jax.jacfwd, g)]
    pairs += [(el.Jacobian, jax.jacfwd, g)]
    for transform, of_jax, function in pairs:
        both = [d(function, holomorphic=True) for d in (transform, of_jax)]
        assert_close(*jax.jit(lambda w: [f(w) for f in both])(W))  # noqa: B023
    assert_close(el.VectorGrad(lambda w: w**3, holomorphic=True)(W), 3 * W**2)
