"""Loops of every shape and type, and settings of JAX that they were traced under."""

import dataclasses

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqloop as el

from ..asserts import assert_close, assert_same_types

XS = jnp.linspace(0.1, 1.0, 6)
SCHEDULES = [el.Recursive(2), el.Binomial(2), el.StoreAll()]


def weak(w):
    step = lambda c, x: ((jnp.tanh(w * c[0] + x), c[1] + 1, c[2] * 2.0), c[1])
    return lax.scan(step, (0.5, 0, 1.0), XS)


def keys(w):
    def step(c, _):
        key, old, h = c
        key, one = jax.random.split(key)
        old, two = jax.random.split(old)
        noise = jax.random.normal(one) + jax.random.normal(two)
        return (key, old, jnp.tanh(w * h + noise)), key

    init = jax.random.key(0), jax.random.PRNGKey(1), 1.0
    (key, old, h), ys = lax.scan(step, init, None, 5)
    return jax.random.key_data(key), old, h, jax.random.key_data(ys)


def partly_unchanged(w):
    step = lambda c, x: ((c[0], jnp.sin(c[0] * c[1] * x), c[2], c[1]), c[0])
    return lax.scan(step, (w, w, 3, w), XS)


def narrow(w):
    step = lambda c, x: (jnp.sin(c * x), c)
    half = jnp.asarray(w, jnp.bfloat16)
    return lax.scan(step, half, XS.astype(jnp.bfloat16))


def complex_(w):
    step = lambda c, x: (jnp.exp(1j * x * w) * c, jnp.abs(c))
    return lax.scan(step, 1.0 + 0.5j * w, XS)


def no_step(w):
    return lax.scan(lambda c, x: (jnp.sin(c * w), (c, x)), w, XS[:0])


def one_step(w):
    return lax.scan(lambda c, x: (jnp.sin(c * w), (c, x)), w, XS[:1])


def without_carry(w):
    return lax.scan(lambda c, x: (c, jnp.sin(w * x)), (), XS)


def in_reverse(w):
    step = lambda c, x: (jnp.sin(w * c + x), c)
    return lax.scan(step, w, XS, reverse=True, unroll=4)


def unrolled(w):
    return lax.scan(lambda c, x: (jnp.sin(w * c + x), c), w, XS, unroll=True)


def counted_up(w):
    return lax.fori_loop(0, 5, lambda i, h: jnp.sin(w * h + i), w)


def mapped(w):
    return lax.map(lambda x: jnp.sin(w * x), XS, batch_size=4)


def handed_on(w):
    return lax.scan(lambda c, x: (c * w, (x, c, 7.0)), w, (XS))


def with_integers(w):
    step = lambda c, x: (c + x, (c, c > 3))
    total, ys = lax.scan(step, 0, jnp.arange(5))
    return total * w, ys


def empty(w):
    step = lambda c, x: (jnp.sin(c * w), x[:0])
    return lax.scan(step, jnp.zeros((0, 2)), jnp.ones((4, 3)))[0], w


FUNCTIONS = {
    f.__name__: f
    for f in (
        weak,
        keys,
        partly_unchanged,
        narrow,
        complex_,
        no_step,
        one_step,
        without_carry,
        in_reverse,
        unrolled,
        counted_up,
        mapped,
        handed_on,
        with_integers,
        empty,
    )
}


def total(f):
    def of(w):
        leaves = [x for x in jax.tree.leaves(f(w)) if eqx.is_inexact_array(x)]
        return sum(jnp.sum(jnp.abs(x) ** 2).astype(jnp.float32) for x in leaves)

    return of


@pytest.mark.sampled
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_values_types_and_derivatives_are_those_of_the_function(f, schedule):
    w, ws = jnp.float32(0.9), jnp.array([0.3, 0.9])

    @jax.jit
    def modes(f, w, ws):
        slope = jax.grad(total(f))
        return f(w), slope(w), jax.vmap(f)(ws), jax.jvp(slope, (w,), (w,))

    with jax.numpy_dtype_promotion("standard"):
        static = jax.tree_util.Partial
        found = modes(static(el.Reschedule(f, schedule)), w, ws)
        expected = modes(static(f), w, ws)
        assert_close(found, expected, 1e-3, 1e-4)
        assert_same_types(found[0], expected[0])


def plain(w, xs):
    return lax.scan(lambda h, x: (jnp.tanh(w * h + x), h), jnp.ones_like(w), xs)


def loss(f):
    return lambda w, xs: jnp.sum(f(w, xs)[0]) + jnp.sum(f(w, xs)[1] ** 2)


FRUGAL = el.Reschedule(plain, el.Recursive(2))


@pytest.mark.parametrize("is_wide", [True, False])
def test_settings_are_those_that_it_was_traced_under(is_wide):
    with jax.enable_x64(is_wide), jax.default_matmul_precision("float32"):
        w, xs = jnp.ones(2), jnp.linspace(0.1, 1.0, 6)
        gradient = jax.grad(loss(FRUGAL))(w, xs)
        assert_same_types(gradient, w)
        assert_close(
            gradient, jax.grad(loss(plain))(w, xs), 1e-5 if not is_wide else 1e-12
        )


def test_explicit_and_automatic_shardings():
    w, xs = jnp.ones((4, 3)), XS
    expected = jax.grad(loss(plain))(w, xs)
    devices = jax.devices()[:2]
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2,), ("i",), (kind,), devices=devices)
        with jax.set_mesh(mesh):
            split = jax.device_put(w, NamedSharding(mesh, PartitionSpec("i")))
            found = jax.jit(jax.grad(loss(FRUGAL)))(split, xs)
            assert_close(jax.device_get(found), jax.device_get(expected))
            if kind == AxisType.Explicit:
                assert jax.typeof(found) == jax.typeof(split)
                assert jax.typeof(FRUGAL(split, xs)[0]) == jax.typeof(split)


def test_in_shard_map_from_outside():
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    i = PartitionSpec("i")
    w = jnp.linspace(0.1, 1, 4)

    def run(f, check):
        on_device = lambda w: lax.psum(loss(f)(w, XS), "i")
        specs = dict(in_specs=i, out_specs=PartitionSpec(), check_vma=check)
        return jax.jit(jax.grad(jax.shard_map(on_device, mesh=mesh, **specs)))(w)

    expected = run(plain, True)
    for check in (True, False):
        assert_close(run(FRUGAL, check), expected)


def test_exported_with_a_length_that_is_not_known():
    (b,) = jax.export.symbolic_shape("b")
    types = jax.ShapeDtypeStruct((b,), jnp.float32), jax.typeof(XS)
    found = jax.export.export(jax.jit(jax.grad(loss(FRUGAL))))(*types)
    w = jnp.linspace(0.1, 1, 3)
    assert_close(found.call(w, XS), jax.grad(loss(plain))(w, XS))
    value = jax.export.export(jax.jit(FRUGAL))(
        jax.typeof(w), jax.ShapeDtypeStruct((b,), XS.dtype)
    )
    assert_close(value.call(w, XS), plain(w, XS))


class Cell(eqx.Module):
    w: jax.Array
    act: object = eqx.field(static=True)
    name: str = "cell"

    def run(self, xs, *, scale):
        step = lambda h, x: (self.act(self.w * h + x * scale), None)
        return lax.scan(step, jnp.ones_like(self.w), xs)[0]

    frugal = el.Reschedule(run, el.Recursive(2))


def test_static_leaves_and_methods():
    cell = Cell(jnp.ones(2), jnp.tanh)
    found = eqx.filter_jit(eqx.filter_grad(lambda c: c.frugal(XS, scale=2.0).sum()))(
        cell
    )
    expected = eqx.filter_grad(lambda c: c.run(XS, scale=2.0).sum())(cell)
    assert_close(found, expected)
    f = el.Reschedule(
        lambda c, how: {"h": c.run(XS, scale=2.0), "how": how}, el.Chunked(2)
    )
    out = eqx.filter_jit(f)(cell, "mean")
    assert out["how"] == "mean"
    assert_close(out["h"], cell.run(XS, scale=2.0))


def test_settings_that_are_edited():
    f = dataclasses.replace(FRUGAL, schedule=el.Chunked(3))
    assert f.plans(jnp.ones(2), XS).taken[0].plan.schedule == el.Chunked(3)
    f = eqx.tree_at(
        lambda f: f.policy, f, el.policies.save_dots, is_leaf=lambda x: x is None
    )
    assert_close(
        jax.grad(loss(f))(jnp.ones(2), XS), jax.grad(loss(plain))(jnp.ones(2), XS)
    )


def test_scopes_are_kept():
    def scoped(w):
        with jax.named_scope("decoder"):
            return plain(w, XS)[0]

    text = (
        jax.jit(jax.grad(el.Reschedule(scoped, el.Recursive(2))))
        .lower(1.0)
        .as_text(debug_info=True)
    )
    assert "jvp(decoder)/eqloop.lax.scan" in text
