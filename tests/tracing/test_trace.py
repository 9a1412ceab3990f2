"""`Trace`, `EvalShape` and `find_leaves`."""

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..weights import without_key

X = jnp.arange(3.0)


class Scale(eqx.Module):
    by: jax.Array
    name: str

    def __call__(self, x, power=1, *, key=None):
        return {"y": self.by * x**power, "name": self.name, "n": 3}


class Signed(eqx.Module):
    like: tuple[float] = eqx.field(static=True)

    def __call__(self, x):
        return jnp.copysign(x, self.like[0])


def test_jaxpr_and_structure():
    jaxpr, out = el.Trace(Scale(2 * X, "a"))(X, 2)
    assert out["name"] == "a"
    assert out["n"] == 3
    assert (out["y"].shape, out["y"].dtype) == ((3,), jnp.float32)
    (y,) = jex.jaxpr_as_fun(jaxpr)(X)
    np.testing.assert_allclose(y, 2 * X**3)
    assert len(jaxpr.in_avals) == 1


def test_inputs_are_in_the_order_of_leaves():
    args, kwargs = ({"b": X, "a": jnp.ones(2)}, "s"), {"z": jnp.ones(4), "y": X[:1]}
    jaxpr, _ = el.Trace(lambda *args, **kwargs: None)(*args, **kwargs)
    leaves = jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))
    assert [a.shape for a in jaxpr.in_avals] == [leaf.shape for leaf in leaves]


@pytest.mark.usefixtures("either_width")
def test_traces_once_for_types_and_static_leaves():
    traces = []

    def f(x, n, by=None):
        traces.append(n)
        return 2 * x if n else x

    trace = el.Trace(f)
    for x in (X, 2 * X, jax.ShapeDtypeStruct((3,), jnp.float32)):
        trace(x, 1)
    assert traces == [1]
    assert "i32" not in str(trace(X, 1).jaxpr)
    trace(X, 1.0)
    trace(X, True)
    trace(X[:2], 1)
    assert traces == [1, 1.0, True, 1]
    trace.leaf_usage(X, 1)
    assert len(traces) == 4


def test_static_fields_that_are_equal_may_be_others():
    traces = [el.Trace(Signed((sign,)))(X).jaxpr for sign in (0.0, -0.0)]
    found = [jex.jaxpr_as_fun(trace)(X)[0] for trace in traces]
    np.testing.assert_array_equal(found, [abs(X), -abs(X)])


def test_other_arrays_of_a_module_are_other_consts():
    one, other = (el.Trace(Scale(by, "a"))(X).jaxpr for by in (X, X + 1))
    np.testing.assert_allclose(jex.jaxpr_as_fun(one)(X)[0], X**2)
    np.testing.assert_allclose(jex.jaxpr_as_fun(other)(X)[0], X * (X + 1))


def test_closes_over_arrays_and_tracers():
    trace = lambda y: el.Trace(lambda x: x * y)(X).jaxpr
    np.testing.assert_allclose(jex.jaxpr_as_fun(trace(2 * X))(X)[0], 2 * X**2)
    run = jax.jit(lambda y: jex.jaxpr_as_fun(trace(y))(X)[0])
    np.testing.assert_allclose(run(2 * X), 2 * X**2)


def test_static_leaves_must_be_hashable():
    class Odd:
        __hash__ = None

    with pytest.raises(TypeError, match=r"Trace: leaves .* must be hashable.*Odd"):
        el.Trace(lambda x, odd: x)(X, Odd())


def test_eval_shape():
    large = jax.ShapeDtypeStruct((100_000, 3), jnp.float32)
    linear = without_key(eqx.nn.Linear, 3, 2)
    out = el.EvalShape(lambda f, x: (jax.vmap(f)(x), "s"))(linear, large)
    assert (out[0].shape, out[1]) == ((100_000, 2), "s")
    assert el.EvalShape(linear)(X).shape == (2,)
    with pytest.raises(TypeError):
        el.EvalShape(linear)(X[:2])


def test_eval_shape_holds_a_function_to_its_annotations():
    def f(x: Float[Array, "2"]):
        return x

    with pytest.raises(TypeError, match="Float"):
        el.EvalShape(f)(X)


def test_find_leaves():
    tree = {"a": [X, None, 3.0], "b": Scale(X[:2], "name")}
    found = lambda where: [path for path, _ in el.find_leaves(tree, where)]
    assert found(eqx.is_array) == ["['a'][0]", "['b'].by"]
    assert found(float) == ["['a'][2]"]
    assert found((float, str)) == ["['a'][2]", "['b'].name"]
    assert found(lambda leaf: leaf is None) == ["['a'][1]"]
    assert found(Float[Array, "3"]) == ["['a'][0]"]
    assert found(Scale) == ["['b']"]
    assert el.find_leaves(tree, Scale)[0][1] is tree["b"]
    assert el.find_leaves(X, eqx.is_array)[0][0] == ""


@pytest.mark.parametrize("where", [3, "weight", (float, 3)])
def test_find_leaves_wrongly(where):
    with pytest.raises(TypeError, match="find_leaves: `where` must be a type"):
        el.find_leaves({"a": 1.0}, where)
