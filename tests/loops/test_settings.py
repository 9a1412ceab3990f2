"""Axes, keys, lengths, `f_axes`, `f_transform`: what `flax.linen.scan` can do."""

import functools
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el

from ..weights import without_key
from .trees import array

pytestmark = pytest.mark.sampled


def cumsum(total: Any, x: Any) -> tuple[Any, Any]:
    return total + jnp.sum(x), total + x


# Lengths


@pytest.mark.parametrize("scan", [el.Scan(cumsum), el.CheckpointedScan(cumsum, base=2)])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_length(scan, length):
    xs = jnp.arange(2.0 * length).reshape(length, 2)
    carry, ys = scan(jnp.zeros(()), xs, length=length)
    expected_carry, expected_ys = jax.lax.scan(cumsum, jnp.zeros(()), xs)
    assert carry == expected_carry
    np.testing.assert_array_equal(ys, expected_ys)


def test_length_without_xs():
    carry, ys = el.Scan(lambda c, x: (c + 1, c))(0, length=np.int64(3))
    assert carry == 3
    np.testing.assert_array_equal(ys, [0, 1, 2])


def test_no_steps_but_the_types_of_some():
    scan = el.CheckpointedScan(cumsum, out_axes=1)
    carry, ys = scan(jnp.ones(()), jnp.zeros((0, 3), jnp.float32))
    assert carry == 1
    assert ys.shape == (3, 0)
    grad = jax.grad(lambda c, xs: scan(c, xs)[0], (0, 1))(1.0, jnp.zeros((0, 3)))
    assert grad[0] == 1
    assert grad[1].shape == (0, 3)


# Axes


def test_tangents_of_one_of_two_axes():
    one, other = array((3, 2), jnp.float32, 0), array((4, 3), jnp.float32, 1)
    step = lambda h, x: (jnp.sin(h + x[0].sum()) * x[1], None)
    h = array((4,), jnp.float32, 2)
    scan = el.CheckpointedScan(step, base=2, in_axes=(0, 1))
    ours = lambda other: scan(h, (one, other))[0]
    theirs = lambda other: jax.lax.scan(step, h, (one, other.T))[0]
    actual, expected = (jax.jvp(f, (other,), (other,)) for f in (ours, theirs))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@hypothesis.given(st.data(), st.integers(1, 3), st.booleans())
@hypothesis.settings(max_examples=8)
def test_axes(data, ndim, reverse):
    in_axis = data.draw(st.integers(-ndim, ndim - 1))
    out_axis = data.draw(st.integers(-ndim, ndim - 1))
    shape = [2, 3, 4][:ndim]
    shape[in_axis] = 5
    xs = array(tuple(shape), jnp.float32, 0)

    def f(c, x):
        return c + jnp.sum(x), 2 * x

    scan = el.CheckpointedScan(
        f, base=2, in_axes=in_axis, out_axes=out_axis, reverse=reverse
    )
    carry, ys = scan(jnp.zeros(()), xs)
    expected, moved = jax.lax.scan(
        f, 0.0, jnp.moveaxis(xs, in_axis, 0), reverse=reverse
    )
    np.testing.assert_allclose(carry, expected, rtol=1e-5)
    np.testing.assert_allclose(ys, jnp.moveaxis(moved, 0, out_axis), rtol=1e-6)


def test_prefixes_of_axes():
    xs = {"a": jnp.ones((2, 5)), "b": [jnp.ones((5, 3)), jnp.ones(5)], "c": jnp.ones(4)}

    def f(c, x):
        assert x["a"].shape == (2,)
        assert x["b"][0].shape == (3,)
        assert x["b"][1].shape == ()
        assert x["c"].shape == (4,)
        return c, x

    scan = el.Scan(
        f,
        in_axes={"a": 1, "b": 0, "c": None},
        out_axes={"a": -1, "b": lambda leaf: leaf.ndim, "c": 0},
    )
    _, ys = scan(0.0, xs)
    shapes = jax.tree.map(jnp.shape, ys)
    assert shapes == {"a": (2, 5), "b": [(3, 5), (5,)], "c": (5, 4)}


def test_broadcast_leaves_are_differentiated():
    def run(scan, xs):
        return scan(jnp.zeros(()), xs)[0]

    def f(c, x):
        return jnp.tanh(c + x["seq"] * x["whole"][0]), None

    xs = {"seq": jnp.arange(4.0), "whole": jnp.array([0.5, 2.0])}
    ours = el.CheckpointedScan(f, base=2, in_axes={"seq": 0, "whole": None})
    gradient = lambda scan: jax.jit(jax.grad(functools.partial(run, scan)))(xs)
    grad = gradient(ours)

    def by_hand(c, xs):
        g = lambda c, s: f(c, {"seq": s, "whole": xs["whole"]})
        return jax.lax.scan(g, c, xs["seq"])

    expected = gradient(by_hand)
    np.testing.assert_allclose(grad["seq"], expected["seq"], rtol=1e-5)
    np.testing.assert_allclose(grad["whole"], expected["whole"], rtol=1e-5)


# Outputs that are the same at every step


def test_invariant_outputs_are_not_stacked():
    calls = 0

    class Cell(eqx.Module):
        weight: jax.Array

        def __call__(self, h, x):
            nonlocal calls
            jax.debug.callback(tick)
            norm = jnp.sum(jax.jit(jnp.square)(self.weight))
            return h + norm * x, {"norm": norm, "table": jnp.arange(3), "h": h, "n": 7}

    def tick():
        nonlocal calls
        calls += 1

    axes = {"norm": None, "table": None, "h": 0, "n": None}
    scan = el.CheckpointedScan(Cell(jnp.array([1.0, 2.0])), base=2, out_axes=axes)
    _, ys = jax.block_until_ready(scan(jnp.zeros(()), jnp.ones(3)))
    jax.effects_barrier()
    assert ys["norm"] == 5
    np.testing.assert_array_equal(ys["table"], [0, 1, 2])
    np.testing.assert_array_equal(ys["h"], [0, 5, 10])
    assert ys["n"] == 7
    assert calls == 3
    grad = eqx.filter_grad(lambda scan: scan(0.0, jnp.ones(3))[1]["norm"])(scan)
    np.testing.assert_array_equal(grad.f.weight, [2, 4])


def test_invariant_outputs_of_no_steps():
    scan = el.Scan(lambda c, x: (c, jnp.arange(3.0)), out_axes=None)
    np.testing.assert_array_equal(scan(0.0, length=0)[1], [0, 1, 2])


# Stacked parameters


class Layer(eqx.Module):
    weight: jax.Array
    shared: jax.Array
    name: str = "layer"

    def __call__(self, h, x):
        return jnp.tanh(self.weight @ h + self.shared), x

    def method(self, h, x):
        return self(h, x)


def unrolled(layer: Layer, h: jax.Array) -> jax.Array:
    for weight in layer.weight:
        h = jnp.tanh(weight @ h + layer.shared)
    return h


STACK = Layer(array((4, 2, 2), jnp.float32, 0), array((2,), jnp.float32, 1))
AXES = Layer(0, None, None)


@pytest.mark.parametrize(
    "f_axes", [AXES, lambda leaf: 0 if np.ndim(leaf) == 3 else None]
)
@pytest.mark.parametrize("method", [False, True], ids=["module", "method"])
def test_f_axes_scan_the_leaves_of_f(f_axes, method):
    h = jnp.ones(2)

    def run(layer, h):
        f = layer.method if method else layer
        axes = eqx.tree_at(lambda m: m.__self__, f, f_axes) if method else f_axes
        scan = el.CheckpointedScan(f, base=2, f_axes=axes if f_axes is AXES else f_axes)
        return scan(h)[0]

    np.testing.assert_allclose(run(STACK, h), unrolled(STACK, h), rtol=1e-5)
    gradient = lambda run: eqx.filter_grad(lambda layer: jnp.sum(run(layer, h)))
    actual, expected = (eqx.filter_jit(gradient(f))(STACK) for f in (run, unrolled))
    np.testing.assert_allclose(actual.weight, expected.weight, rtol=1e-4)
    np.testing.assert_allclose(actual.shared, expected.shared, rtol=1e-4)


def test_f_axes_need_not_be_leading():
    turned = Layer(jnp.moveaxis(STACK.weight, 0, 2), STACK.shared)
    scan = el.Scan(turned, f_axes=Layer(-1, None, None))
    h = jnp.ones(2)
    np.testing.assert_allclose(scan(h)[0], unrolled(STACK, h), rtol=1e-5)


def test_f_transform_is_applied_to_each_layer():
    seen = []

    def halve(layer):
        seen.append(layer.weight.shape)
        return eqx.tree_at(lambda layer: layer.weight, layer, layer.weight / 2)

    h = jnp.ones(2)
    scan = el.Scan(STACK, f_axes=AXES, f_transform=halve)
    halved = Layer(STACK.weight / 2, STACK.shared)
    np.testing.assert_allclose(scan(h)[0], unrolled(halved, h), rtol=1e-5)
    assert seen == [(2, 2)]


def test_f_transform_may_say_where_a_layer_lives():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    constrain = functools.partial(jax.lax.with_sharding_constraint, shardings=place)

    def spread(layer):
        return eqx.tree_at(lambda layer: layer.weight, layer, replace_fn=constrain)

    run = lambda h: el.Scan(STACK, f_axes=AXES, f_transform=spread)(h)[0]
    program = str(jax.make_jaxpr(run)(jnp.ones(2)))
    assert "sharding_constraint" in program[program.index("scan") :]
    expected = unrolled(STACK, jnp.ones(2))
    np.testing.assert_allclose(jax.jit(run)(jnp.ones(2)), expected, rtol=1e-5)


def test_scanned_broadcast_and_carried_parameters_at_once():
    mlp = without_key(eqx.nn.Linear, 2, 2)

    def f(carry, x):
        h, mlp = carry
        mlp = eqx.tree_at(lambda m: m.bias, mlp, mlp.bias + 1)
        return (mlp(h) + x, mlp), None

    (_, after), _ = el.CheckpointedScan(f)((jnp.ones(2), mlp), jnp.ones((3, 2)))
    np.testing.assert_allclose(after.bias, mlp.bias + 3, rtol=1e-6)
    np.testing.assert_array_equal(after.weight, mlp.weight)


# Keys


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_each_step_gets_a_key_of_its_own(make):
    keys = jax.random.split(make(3), 4)
    expected = jax.vmap(jax.random.normal)(keys)
    f = lambda c, x, *, key: (c, jax.random.normal(key))
    for scan in (el.Scan(f), el.CheckpointedScan(f, base=2)):
        _, ys = scan(0.0, length=4, key=make(3))
        np.testing.assert_array_equal(ys, expected)
    _, ys = el.Scan(f, reverse=True)(0.0, length=4, key=make(3))
    np.testing.assert_array_equal(ys, expected)


def test_numpy_keys():
    f = lambda c, x, key: (c, jax.random.normal(key))
    key = jax.random.PRNGKey(3)
    np.testing.assert_array_equal(
        el.Scan(f)(0.0, length=2, key=np.asarray(key))[1],
        el.Scan(f)(0.0, length=2, key=key)[1],
    )


def test_one_key_for_all_steps():
    key = jax.random.key(3)
    f = lambda c, x, key: (c, jax.random.normal(key))
    _, ys = el.Scan(f, split_keys=False)(0.0, length=3, key=key)
    np.testing.assert_array_equal(ys, jnp.full(3, jax.random.normal(key)))
    # The key being the same at every step, so may be what depends on it.
    _, y = el.Scan(f, split_keys=False, out_axes=None)(0.0, length=3, key=key)
    assert y == jax.random.normal(key)


def test_dropout_differs_from_step_to_step():
    dropout = eqx.nn.Dropout(0.5)
    f = lambda c, x, key: (c, dropout(x, key=key))
    _, ys = el.CheckpointedScan(f)(0.0, jnp.ones((3, 20)), key=jax.random.key(0))
    assert len({tuple(row) for row in np.asarray(ys)}) == 3


# Reverse and unroll


@pytest.mark.parametrize("unroll", [1, np.int64(3), True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_reverse_and_unroll(reverse, unroll):
    xs = jnp.arange(7.0)
    f = lambda c, x: (jnp.sin(c) + x, c * x)
    expected = jax.lax.scan(f, 0.0, xs, reverse=reverse)
    for transform in (el.Scan, el.CheckpointedScan):
        scan = transform(f, reverse=reverse, unroll=unroll)
        for a, e in zip(scan(0.0, xs), expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-6)


def test_whole_loop_unrolled():
    compiled = jax.jit(el.Scan(cumsum, unroll=True)).lower(0.0, jnp.ones(5)).compile()
    assert "while" not in compiled.as_text()


# Plans


def test_a_plan_needs_types_only_and_runs_nothing():
    ran = []

    def f(carry, x, key):
        jax.debug.callback(ran.append, x)
        return {**carry, "h": carry["h"] + x}, jax.random.normal(key)

    key, h, xs = jax.random.key(0), jnp.zeros(3), jnp.zeros((64, 3))
    scan = el.CheckpointedScan(f, base=4)
    plan = scan.plan({"h": h, "s": "static"}, xs, key=key)
    abstract = jax.eval_shape(lambda: (h, xs, key))
    h, xs, key = abstract
    assert scan.plan({"h": h, "s": "static"}, xs, key=key) == plan
    assert plan.length == 64
    assert plan != el.CheckpointedScan(f, base=8).plan({"h": h}, xs, key=key)
    jax.effects_barrier()
    assert ran == []


# In other transforms


@pytest.mark.parametrize("transform", [el.Scan, el.CheckpointedScan])
def test_within_shard_map_a_carry_may_come_to_differ_between_devices(transform):
    axis = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("device",), axis_types=(axis,))
    spec = jax.sharding.PartitionSpec(None, "device")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    def run(xs):
        return transform(lambda c, x: (jnp.sin(c + x), c))(0.0, xs[:, 0])[1][:, None]

    xs = array((5, 4), jnp.float32, 0)
    expected = jax.vmap(
        lambda xs: jax.lax.scan(lambda c, x: (jnp.sin(c + x), c), 0.0, xs)[1], 1, 1
    )(xs)
    np.testing.assert_allclose(run(xs), expected, rtol=1e-5, atol=1e-6)


def test_within_itself():
    def inner(c, x):
        return jnp.sin(c + x), c

    def outer(c, xs):
        c, ys = el.CheckpointedScan(inner, base=2)(c, xs)
        return c, jnp.sum(ys)

    def expected(c, xs):
        c, ys = jax.lax.scan(inner, c, xs)
        return c, jnp.sum(ys)

    xs = array((3, 5), jnp.float32, 0)
    loss = lambda scan, xs: sum(map(jnp.sum, scan(jnp.zeros(()), xs)))
    scans = (
        el.CheckpointedScan(outer, base=2),
        lambda c, xs: jax.lax.scan(expected, c, xs),
    )
    both = (
        jax.jit(jax.value_and_grad(functools.partial(loss, scan)))(xs) for scan in scans
    )
    for a, e in zip(*both, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)
