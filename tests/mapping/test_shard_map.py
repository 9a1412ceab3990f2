"""`ShardMap` against `jax.shard_map`, and on leaves that this does not take."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_close, assert_raises
from .devices import (
    DEVICES,
    collectives,
    explicit_mesh_of,
    mesh_of,
)

MESH = mesh_of(x=DEVICES)
GRID = mesh_of(a=2, b=4)
XS = jnp.sin(jnp.arange(32.0)).reshape(16, 2)


class Part(eqx.Module):
    """Has an array and a leaf that is none; takes and returns leaves of all kinds."""

    weight: jax.Array
    activation: object = jnp.tanh

    def __call__(self, x, scale, mode):
        y = self.activation(x @ self.weight) * scale
        total = jax.lax.psum(jnp.sum(y), "x")
        return {"y": y, "total": total, "mode": mode, "none": None, "one": 1}


WEIGHT = jnp.array([[0.5, 1.0], [-1.0, 2.0]])
OUT_SPECS = {"y": P("x"), "total": P(), "mode": P(), "none": P(), "one": None}


def shard_map(f, **settings):
    settings = dict(mesh=MESH, in_specs=P("x"), out_specs=P("x")) | settings
    return el.ShardMap(f, **settings)


def part(weight=WEIGHT, **settings):
    settings = dict(in_specs=(P("x"), P(), P()), out_specs=OUT_SPECS) | settings
    return shard_map(Part(weight), **settings)


@jax.jit
def plain(weight, xs):
    """What `Part` computes, by `jax.shard_map`."""

    def f(weight, x):
        y = jnp.tanh(x @ weight) * 2
        return y, jax.lax.psum(jnp.sum(y), "x")

    specs = dict(in_specs=(P(), P("x")), out_specs=(P("x"), P()))
    return jax.shard_map(f, mesh=MESH, **specs)(weight, xs)


def loss(y, total):
    return jnp.sum(y**2) + total


def test_is_jax_shard_map_with_its_derivatives():
    def ours(weight, xs):
        out = part(weight)(xs, jnp.float32(2), "mode")
        return out["y"], out["total"]

    def derivatives(f):
        of = lambda *args: loss(*f(*args))
        return (
            f(WEIGHT, XS),
            jax.grad(of, (0, 1))(WEIGHT, XS),
            jax.hessian(of)(WEIGHT, XS),
        )

    actual, expected = jax.jit(lambda: [derivatives(f) for f in (ours, plain)])()
    assert_close(actual, expected)
    assert not actual[0][0].sharding.is_fully_replicated


def test_leaves_that_are_no_arrays():
    out = part()(XS, 2.0, "mode")
    assert (out["mode"], out["none"], out["one"]) == ("mode", None, 1)
    compiled = eqx.filter_jit(part())(XS, np.float32(2), "mode")
    assert_close(out, compiled)


def test_the_gradient_of_f_is_summed_over_the_devices_once():
    gradient = eqx.filter_grad(lambda f, xs: jnp.sum(f(xs, 2.0, None)["y"] ** 2))
    found = eqx.filter_jit(gradient)(part(), XS).f.weight
    expected = jax.jit(jax.grad(lambda w: jnp.sum(plain(w, XS)[0] ** 2)))(WEIGHT)
    assert_close(found, expected)
    assert collectives(gradient, part(), XS) == {"all-reduce": 1}


@pytest.mark.parametrize("make_mesh", [mesh_of, explicit_mesh_of])
def test_the_mesh_of_set_mesh(make_mesh):
    f = part(mesh=None)
    with jax.set_mesh(make_mesh(x=DEVICES)):
        out, gradient = eqx.filter_jit(
            lambda f, xs: (
                f(xs, 2.0, None)["y"],
                eqx.filter_grad(lambda f: f(xs, 2.0, None)["total"])(f).f.weight,
            )
        )(f, XS)
    np.testing.assert_allclose(out, plain(WEIGHT, XS)[0], rtol=1e-5)
    expected = jax.jit(jax.grad(lambda w: plain(w, XS)[1]))(WEIGHT)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


def test_one_inside_another():
    def inner(x):
        return x + jax.lax.psum(jnp.sum(x), "b")

    def outer(x):
        each = el.ShardMap(inner, in_specs=P("b"), out_specs=P("b"))
        return each(x) * (1.0 + jax.lax.axis_index("a").astype(float))

    specs = dict(mesh=GRID, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    found = jax.jit(el.ShardMap(outer, **specs))(XS[:, 0])
    first, second = jnp.split(XS[:, 0], 2)
    expected = [first + first.sum(), 2 * (second + second.sum())]
    np.testing.assert_allclose(found, jnp.concatenate(expected), rtol=1e-5)


def test_with_other_maps_and_loops():
    """Chunks of rows on each device, each through a loop; and all of it under vmap."""

    def local(w, xs):
        loop = el.CheckpointedScan(lambda h, x: (jnp.tanh(w * h + x), h), base=2)
        return el.ChunkedVmap(lambda x: loop(jnp.float32(0), x), 1)(xs)

    def whole(w, xs):
        step = lambda h, x: (jnp.tanh(w * h + x), h)
        return jax.vmap(lambda x: jax.lax.scan(step, jnp.float32(0), x))(xs)

    split = shard_map(local, in_specs=(P(), P("x")))

    def derivatives(f):
        def loss(w, xs):
            last, path = f(w, xs)
            return jnp.sum(last**2) + jnp.sum(path**3)

        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.arange(2.0), XS)

    assert_close(*jax.jit(lambda: [derivatives(f) for f in (split, whole)])())


def test_arrays_that_are_elsewhere_are_moved():
    weight = jax.device_put(WEIGHT, jax.devices()[3])
    xs = jax.device_put(XS, jax.devices()[5])
    assert_close(part(weight)(xs, 2.0, None)["y"], plain(WEIGHT, XS)[0])


def test_keys():
    keys = jax.random.split(jax.random.key(0), DEVICES)
    found = jax.jit(shard_map(lambda keys: jax.vmap(jax.random.normal)(keys)))(keys)
    assert_close(found, jax.vmap(jax.random.normal)(keys))


def test_without_the_check():
    f = lambda x: jax.lax.all_gather(x, "x", tiled=True)
    gathered = shard_map(f, out_specs=P(), check_vma=False)(XS)
    np.testing.assert_array_equal(gathered, XS)


# Wrong calls

IDENTITY = lambda x: x
WRONG = {
    "no mesh": (
        lambda: shard_map(IDENTITY, mesh=None)(XS),
        "ValueError: ShardMap: there is no mesh … jax.set_mesh",
    ),
    "not a mesh": (
        lambda: shard_map(IDENTITY, mesh=jax.devices()),
        "TypeError: ShardMap: `mesh` must be a jax.sharding.Mesh … of type list",
    ),
    "no specifications": (
        lambda: el.ShardMap(IDENTITY, mesh=MESH),
        "TypeError: … in_specs … out_specs",
    ),
    "too few specifications": (
        lambda: shard_map(jnp.add, in_specs=(P("x"),))(XS, XS),
        "ValueError: … in_specs has 1 entries … 2 arguments",
    ),
    "no specification": (
        lambda: shard_map(IDENTITY, in_specs=({"h": "x"},))({"h": XS}),
        "TypeError: … in_specs[0]['h'] must be a jax.sharding.PartitionSpec … x['h'] "
        "… 'x'",
    ),
    "no prefix": (
        lambda: shard_map(IDENTITY, in_specs=([P("x")],))({"h": XS}),
        "ValueError: … in_specs[0]= … is not a prefix of x … Give one PartitionSpec",
    ),
    "an unknown axis": (
        lambda: shard_map(IDENTITY, in_specs=P(None, "y"))({"h": XS}),
        "ValueError: … in_specs= … for x['h'], names 'y' … the axes to split over are "
        "'x'",
    ),
    "an axis that is not mapped": (
        lambda: shard_map(IDENTITY, mesh=GRID, axis_names={"a"}, in_specs=P("b"))(XS),
        "ValueError: … names 'b' … the axes to split over are 'a'",
    ),
    "an unknown axis among axis_names": (
        lambda: shard_map(IDENTITY, mesh=GRID, axis_names={"x"})(XS),
        "ValueError: … axis_names has 'x' … 'a', 'b'",
    ),
    "more entries than axes": (
        lambda: shard_map(IDENTITY, in_specs=P(None, None, "x"))(XS),
        "ValueError: … has 3 entries, but x is float32[16,2] and has 2 axes",
    ),
    "lengths that the devices do not divide": (
        lambda: shard_map(IDENTITY)({"h": XS[:9], "c": XS}),
        "ValueError: … x['h']: float32[9,2], axis 0 in 8 parts along 'x' … "
        "`ParallelMap`",
    ),
    "a result that differs": (
        lambda: shard_map(lambda x: {"y": x}, out_specs=P())(XS),
        "ValueError: … out['y'] … it differs along 'x' … jax.lax.psum … "
        "check_vma=False",
    ),
    "a result without axes": (
        lambda: shard_map(lambda x: jnp.sum(x))(XS),
        "ValueError: … out_specs= … out is float32[] and has 0 axes … `out[None]`",
    ),
    "specifications of other results": (
        lambda: shard_map(IDENTITY, out_specs={"y": P("x")})(XS),
        "ValueError: … out_specs={'y' … is not a prefix of out",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls(wrong):
    assert_raises(*WRONG[wrong])


def test_jaxtyping_annotations_are_about_the_parts():
    def f(x: Float[Array, "2 2"]) -> Float[Array, "2 2"]:
        return x

    shard_map(f)(XS)
    with pytest.raises(TypeError) as caught:
        shard_map(f)(jnp.ones((8, 2)))
    assert any("ShardMap traced f" in note for note in caught.value.__notes__)
