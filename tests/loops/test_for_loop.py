"""`ForLoop` and `CheckpointedForLoop` against `jax.vmap` and `jax.lax.scan`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..marks import slow
from ..weights import without_key
from .random_scans import jvp, vjp, vmap

pytestmark = pytest.mark.sampled

LOOPS = (
    el.ForLoop,
    el.CheckpointedForLoop,
    lambda f, **settings: el.ForLoop(f, schedule=el.Binomial(2, block=2), **settings),
)
names = ["ForLoop", "CheckpointedForLoop", "blocks"]
each_loop = pytest.mark.parametrize("loop", LOOPS, ids=names)

MODEL = without_key(eqx.nn.Linear, 3, 2)
XS = jnp.sin(jnp.arange(18.0)).reshape(6, 3)
WEIGHTS = jnp.cos(jnp.arange(6.0))


class Weighted(eqx.Module):
    model: eqx.nn.Linear

    def __call__(self, x: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
        y = jnp.tanh(self.model(x))
        return {"y": y, "loss": weight * jnp.sum(y**2)}


@each_loop
@pytest.mark.parametrize("either_width", [slow(False), True], indirect=True)
@pytest.mark.usefixtures("either_width")
def test_values_and_derivatives_are_those_of_a_vmap(loop):
    ours = lambda f, xs, weights: loop(f)(xs, weights)
    theirs = lambda f, xs, weights: jax.vmap(f)(xs, weights)

    @eqx.filter_jit
    def derivatives(run: Any, *args: Any) -> Any:
        return run(*args), jvp(run, *args), vjp(run, *args), vmap(run, *args)

    args = (Weighted(MODEL), XS, WEIGHTS)
    assert_close(derivatives(ours, *args), derivatives(theirs, *args))


@each_loop
def test_the_gradient_of_the_module(loop):
    loss = lambda f: jnp.sum(f(XS, WEIGHTS)["loss"])
    actual = eqx.filter_grad(loss)(loop(Weighted(MODEL))).f
    assert_close(actual, eqx.filter_grad(lambda f: loss(jax.vmap(f)))(Weighted(MODEL)))


def test_second_derivatives():
    second = lambda run: jax.jit(jax.hessian(lambda xs: jnp.sum(run(xs) ** 2)))(WEIGHTS)
    np.testing.assert_allclose(
        second(el.CheckpointedForLoop(jnp.sin)), second(jax.vmap(jnp.sin)), atol=1e-6
    )


def test_steps_are_run_in_order():
    places = []

    def note(i: Any) -> Any:
        jax.debug.callback(lambda i: places.append(int(i)), i, ordered=True)
        return 2 * i

    doubled = el.ForLoop(note, reverse=True)(jnp.arange(4))
    jax.effects_barrier()
    assert doubled.tolist() == [0, 2, 4, 6]
    assert places == [3, 2, 1, 0]


def test_without_xs():
    assert el.ForLoop(lambda: 1)(length=3).tolist() == [1, 1, 1]


def test_keys():
    draw = el.ForLoop(lambda x, key: x + jax.random.normal(key))
    same = el.ForLoop(draw.f, split_keys=False)
    key, xs = jax.random.key(0), jnp.zeros(4)
    expected = jax.vmap(jax.random.normal)(jax.random.split(key, 4))
    np.testing.assert_array_equal(draw(xs, key=key), expected)
    assert len(set(same(xs, key=key).tolist())) == 1


def test_axes_are_a_tuple_as_those_of_vmap():
    f = lambda x, tree, whole: (x @ whole, tree["a"] * tree["b"])
    xs = (XS.T, {"a": WEIGHTS, "b": "static"}, jnp.ones(3))
    in_axes = (1, {"a": 0, "b": None}, None)
    static = lambda x, tree, whole: f(x, {**tree, "b": 2.0}, whole)
    actual = el.ForLoop(static, in_axes=in_axes, out_axes=(0, -1))(*xs)
    expected = jax.vmap(static, in_axes=(1, {"a": 0}, None))(
        XS.T, {"a": WEIGHTS}, jnp.ones(3)
    )
    assert_close(actual, expected)


def test_static_leaves_go_in_and_out():
    f = lambda x, how: ({"tanh": jnp.tanh, "sin": jnp.sin}[how](x), how, None)
    out, how, none = el.CheckpointedForLoop(f)(WEIGHTS, "sin")
    np.testing.assert_allclose(out, jnp.sin(WEIGHTS), rtol=1e-6)
    assert (how, none) == ("sin", None)


def test_layers_that_are_scanned():
    keys = jax.random.split(jax.random.key(1), 6)
    ensemble = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 2, key=key))(keys)
    actual = el.ForLoop(ensemble, f_axes=eqx.if_array(0))(XS)
    expected = eqx.filter_vmap(lambda layer, x: layer(x))(ensemble, XS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_what_is_called_is_transformed_first():
    cast = lambda model: jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    loop = el.ForLoop(MODEL, f_transform=cast)
    assert loop(XS.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@each_loop
def test_no_steps(loop):
    out = loop(jnp.dot)(jnp.zeros((0, 3)), jnp.zeros((0, 3)))
    assert out.shape == (0,)


def test_as_a_method():
    class Model(eqx.Module):
        scale: jax.Array

        @el.CheckpointedForLoop(base=4)
        def scaled(self, x: jax.Array) -> jax.Array:
            return self.scale * x

    model = Model(jnp.array(2.0))
    assert model.scaled(jnp.arange(3.0)).tolist() == [0, 2, 4]
    assert eqx.filter_grad(lambda m: m.scaled(jnp.ones(3)).sum())(model).scale == 3


# What it costs


def test_no_step_is_run_but_to_be_reversed():
    runs = []

    def count(x: Any) -> Any:
        jax.debug.callback(lambda _: runs.append(0), x)
        return jnp.sin(x)

    loop = el.CheckpointedForLoop(count, base=2)
    jax.block_until_ready(jax.grad(lambda xs: jnp.sum(loop(xs)))(jnp.ones(9)))
    jax.effects_barrier()
    assert len(runs) == loop.plan(jnp.ones(9)).evaluations == 18


def test_plans_and_the_frontier():
    f = lambda x, w: jnp.tanh(w @ jnp.tanh(w @ x))
    xs = (jax.ShapeDtypeStruct((500, 16), jnp.float32), jnp.eye(16))
    loop = el.CheckpointedForLoop(f, in_axes=(0, None))
    stored = el.ForLoop(f, in_axes=(0, None)).plan(*xs)
    assert loop.plan(*xs).peak_bytes < stored.peak_bytes / 20
    plans = loop.frontier(*xs)
    assert plans.chosen == loop.plan(*xs)
    assert min(plan.peak_bytes for plan in plans) < stored.peak_bytes / 20
    assert el.ForLoop(lambda: 1.0).plan(length=3).length == 3
