"""`ParallelMap` on eight devices against `Vmap` on one."""

import collections
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_close, assert_raises
from ..marks import slow
from ..weights import without_key
from .devices import (
    DEVICES,
    collectives,
    explicit_mesh_of,
    mesh_of,
)

pytestmark = pytest.mark.sampled


class Cell(eqx.Module):
    """A function with an array, a loop, a branch, and results of all kinds."""

    weight: jax.Array

    def __call__(self, x, mode, shared, *, key):
        step = lambda h, x: (jnp.tanh(self.weight * h + x), h)
        last, path = el.CheckpointedScan(step, base=2)(shared, x)
        kept = jax.lax.cond(last > 0, lambda: last, lambda: -last)
        noise = jax.random.normal(key)
        same = self.weight * shared
        return dict(y=kept + noise, path=path, sign=last > 0, mode=mode, same=same)


OUT_AXES = {"y": 0, "path": -1, "sign": 0, "mode": None, "same": None}
SETTINGS = dict(in_axes={"x": 1, "shared": None}, out_axes=OUT_AXES)


def call(cell_map, x, shared, key):
    return cell_map(x, "mode", shared, key=key)


def with_derivatives(cell_map, x, shared, key):
    """The results, and the gradient and a tangent of all inexact inputs."""

    def values(inputs):
        out = call(*inputs, key)
        return out["y"], out["path"], out["same"]

    def loss(inputs):
        y, path, same = values(inputs)
        return jnp.sum(y**2) + jnp.sum(jnp.cos(path)) + same

    inputs = (cell_map, x, shared)
    dynamic, static = eqx.partition(inputs, eqx.is_array)
    join = lambda dynamic: values(eqx.combine(dynamic, static))
    _, tangents = jax.jvp(join, (dynamic,), (jax.tree.map(jnp.ones_like, dynamic),))
    gradient = eqx.filter_grad(loss)(inputs)
    arrays = jax.tree.leaves(gradient)
    return call(*inputs, key), arrays, tangents


@pytest.mark.parametrize(
    ("rows", "chunk_size"),
    [
        (0, None),
        slow(1, 3),
        slow(8, 1),
        slow(9, None),
        (19, 2),
        slow(40, el.Budget("64KiB")),
    ],
)
def test_is_vmap_with_its_derivatives(rows, chunk_size):
    x = jnp.sin(jnp.arange(5.0 * rows)).reshape(5, rows)
    cell = Cell(jnp.float32(0.7))
    args = (x, jnp.float32(0.3), jax.random.key(0))
    split = el.ParallelMap(cell, chunk_size=chunk_size, **SETTINGS)
    whole = el.Vmap(cell, **SETTINGS)
    both = eqx.filter_jit(lambda *fs: [with_derivatives(f, *args) for f in fs])
    assert_close(*both(split, whole))


def test_outside_of_jit():
    linear = without_key(eqx.nn.Linear, 3, 2)
    x = jnp.ones((9, 3))
    split, whole = el.ParallelMap(linear, chunk_size=1), el.Vmap(linear)
    assert_close(split(x), whole(x))
    gradient = eqx.filter_grad(lambda f: jnp.sum(f(x) ** 2))
    assert_close(gradient(split).f, gradient(whole).f)


def test_other_modes():
    x = jnp.linspace(0.1, 1, 9)
    f = lambda x: jnp.sum(el.ParallelMap(jnp.sin, chunk_size=1)(x) ** 2)
    expected = lambda x: jnp.sum(jnp.sin(x) ** 2)
    modes = lambda f: (jax.hessian(f)(x), jax.vmap(f)(jnp.stack([x, 2 * x])))
    assert_close(*jax.jit(lambda: (modes(f), modes(expected)))())


# Where things are


def is_split(x, axis=0):
    return x.sharding.shard_shape(x.shape)[axis] * DEVICES == x.shape[axis]


def test_an_ensemble_is_made_where_it_lives():
    make = lambda key: eqx.nn.MLP(2, 3, 4, depth=1, key=key)
    keys = jax.random.split(jax.random.key(0), 2 * DEVICES)
    ensemble = el.ParallelMap(make)(keys)
    assert all(map(is_split, jax.tree.leaves(eqx.filter(ensemble, eqx.is_array))))
    assert_close(ensemble, el.Vmap(make)(keys))

    predict = el.ParallelMap(lambda model, x: model(x), in_axes={"x": None}, out_axes=1)
    y = predict(ensemble, jnp.ones(2))
    assert is_split(y, axis=1)
    assert not collectives(predict, ensemble, jnp.ones(2))


def test_nothing_moves_but_the_gradient_of_what_is_shared():
    layer = without_key(eqx.nn.Linear, 3, 3)
    f = el.ParallelMap(lambda layer, x: jnp.tanh(layer(x)), in_axes={"layer": None})
    x = jnp.ones((4 * DEVICES, 3))
    assert not collectives(f, layer, x)
    loss = lambda layer, x: jnp.sum(f(layer, x))
    moved = collectives(jax.grad(loss, (0, 1)), layer, x)
    assert set(moved) == {"all-reduce"}
    assert moved["all-reduce"] <= 2  # the weight, and the bias


def test_devices():
    devices = jax.devices()[2:5]
    y = el.ParallelMap(jnp.sin, devices=devices)(jnp.arange(6.0))
    assert y.sharding.device_set == set(devices)
    np.testing.assert_allclose(y, np.sin(np.arange(6.0)), rtol=1e-6)


def test_on_one_device_it_is_a_chunked_vmap():
    (device,) = jax.devices()[3:4]
    x = jnp.ones((12, 3))
    one = el.ParallelMap(jnp.cumsum, devices=[device], chunk_size=4)
    assert one(x).sharding.device_set == {device}
    windows = [
        re.findall(
            r"reduce_window.*?-> tensor<(.*?)>", jax.jit(f).lower(x).as_text(), re.S
        )
        for f in (one, el.ChunkedVmap(jnp.cumsum, 4))
    ]
    assert windows == [["4x3xf32"]] * 2


def test_arrays_that_are_elsewhere_are_moved():
    there = lambda x, i: jax.device_put(x, jax.devices()[i])
    layer = without_key(eqx.nn.Linear, 3, 3)
    x = jnp.ones((DEVICES, 3))
    moved = el.ParallelMap(jax.tree.map(lambda leaf: there(leaf, 3), layer))
    assert_close(moved(there(x, 5)), jax.vmap(layer)(x))


def test_a_function_may_close_over_arrays_on_the_mesh():
    mesh = mesh_of(rows=DEVICES)
    w = jax.device_put(jnp.eye(3), NamedSharding(mesh, P()))
    f = lambda w, x: el.ParallelMap(lambda x: jnp.tanh(w @ x), mesh=mesh)(x)
    x = jnp.ones((DEVICES, 3))
    assert_close(f(w, x), jnp.tanh(x))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(f(w, x))))(w)
    expected = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w.T)))(jnp.eye(3))
    assert_close(gradient, expected)


# Every pair of two, and each week all three of them.
@pytest.mark.parametrize(
    ("make_mesh", "rows", "sizes"),
    [
        (make, rows, sizes) if (i + j + k) % 2 else slow(make, rows, sizes)
        for i, make in enumerate((mesh_of, explicit_mesh_of))
        for j, rows in enumerate((8, 9))
        for k, sizes in enumerate((dict(rows=8), dict(model=2, rows=4)))
    ],
)
def test_meshes(make_mesh, rows, sizes):
    x = jnp.arange(3.0 * rows).reshape(rows, 3)
    f = el.ParallelMap(lambda w, x: w @ x, in_axes={"w": None}, axis_name="rows")
    loss = lambda w: jnp.sum(f(w, x) ** 2)
    with jax.set_mesh(make_mesh(**sizes)):
        y, gradient = jax.jit(lambda w: (f(w, x), jax.grad(loss)(w)))(jnp.eye(3))
    np.testing.assert_allclose(y, x, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x.T @ x, rtol=1e-4)


def test_one_map_over_each_axis_of_a_mesh():
    mesh = mesh_of(rows=2, columns=4)
    inner = el.ParallelMap(jnp.sin, axis_name="columns")
    outer = el.ParallelMap(lambda row: inner(row), axis_name="rows")
    x = jnp.arange(12.0).reshape(2, 6)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(outer)(x), np.sin(x), rtol=1e-5)


# Rows that there are not


def test_f_sees_no_row_that_is_not_there():
    seen = collections.Counter()

    def f(x):
        jax.debug.callback(lambda x: seen.update([int(x)]), x)
        return x

    el.ParallelMap(f)(jnp.arange(11))
    jax.effects_barrier()
    assert set(seen) == set(range(11))
    assert seen.total() == 2 * DEVICES
    assert [row for row, count in seen.items() if count > 1] == [10]


@pytest.mark.parametrize("rows", [1, 9, 16])
def test_the_last_row_counts_once_where_its_derivative_is_infinite(rows):
    f = lambda x: jnp.sum(el.ParallelMap(jnp.sqrt)(x))
    gradient = jax.grad(f)(jnp.zeros(rows))
    np.testing.assert_array_equal(gradient, np.full(rows, np.inf))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.4, 0.4),))


@pytest.mark.parametrize(("rows", "chunk_size"), [(9, None), (20, 2), (3, None)])
def test_the_last_row_counts_once_where_its_backward_rule_is_not_linear(
    rows, chunk_size
):
    def gradient(mapped):
        f = lambda w, x: clipped(w * x) * jnp.sin(x)
        total = lambda w, x: jnp.sum(mapped(f)(w, x))
        return jax.grad(total, (0, 1))(1.5, jnp.cos(jnp.arange(1.0, rows + 1)))

    parallel = el.ParallelMap(in_axes=(None, 0), chunk_size=chunk_size)
    assert_close(gradient(parallel), gradient(el.Vmap(in_axes=(None, 0))))


# Collectives


def among_rows(x):
    """What a row can know of the others."""
    mean = lambda c, _: (jax.lax.pmean(jnp.sin(c), "rows"), None)
    return dict(
        share=x / jax.lax.psum(x, "rows"),
        index=jax.lax.axis_index("rows"),
        count=jnp.float32(jax.lax.axis_size("rows")),
        first=jax.lax.all_gather(x, "rows")[0],
        loop=jax.lax.scan(mean, x, length=2)[0],
        most=jax.lax.pmax(jax.lax.stop_gradient(x), "rows"),
    )


@pytest.mark.parametrize("rows", [DEVICES, 3 * DEVICES])
@pytest.mark.parametrize("sizes", [slow(dict(rows=8)), dict(rows=4, model=2)])
def test_collectives_speak_to_all_rows(rows, sizes):
    mesh = mesh_of(**sizes)
    x = 1 + jnp.sin(jnp.arange(2.0 * rows)).reshape(rows, 2)
    split = el.ParallelMap(among_rows, mesh=mesh, axis_name="rows", chunk_size=9)
    whole = el.Vmap(among_rows, axis_name="rows")

    def loss(f, x):
        out = f(x)
        return sum(jnp.sum(jnp.sin(out[k])) for k in ("share", "first", "loop"))

    both = lambda f: (f(x), jax.grad(lambda x: loss(f, x))(x))
    assert_close(*jax.jit(lambda: (both(split), both(whole)))())
    assert not split(x)["share"].sharding.is_fully_replicated


def test_a_count_of_rows_is_not_one_of_devices():
    size = lambda x: x * jax.lax.axis_size("rows")  # no collective is left of it
    y = el.ParallelMap(size)(jnp.ones(19))
    np.testing.assert_array_equal(y, np.full(19, 19.0))


@pytest.mark.parametrize("rows", [DEVICES, 4 * DEVICES])
def test_a_sum_over_all_rows_is_one_reduction(rows):
    normalise = lambda x: x / jax.lax.psum(x, "rows")
    moved = collectives(el.ParallelMap(normalise), jnp.ones((rows, 3)))
    assert moved == {"all-reduce": 1}


# As any transform


def test_as_a_decorator_and_as_a_method():
    class Model(eqx.Module):
        weight: jax.Array

        @el.ParallelMap(in_axes={"bias": None})
        def __call__(self, x: Float[Array, ""], bias) -> Float[Array, ""]:
            return self.weight * x + bias

    model = Model(jnp.float32(2.0))
    np.testing.assert_array_equal(model(jnp.arange(8.0), 1), 2 * np.arange(8.0) + 1)
    with pytest.raises(TypeError, match="x"):
        model(jnp.ones((8, 2)), 1)


def test_is_a_module_with_static_settings():
    mesh = mesh_of(rows=DEVICES)
    make = lambda: el.ParallelMap(eqx.nn.Identity(), mesh=mesh, in_axes={"x": [0]})
    assert jax.tree.leaves(make()) == []
    assert make() == make()
    assert hash(jax.tree.structure(make())) == hash(jax.tree.structure(make()))


# Wrong calls

MESH = mesh_of(a=2, b=4)
ONES = jnp.ones((16, 3))
SUM = lambda x: jax.lax.psum(x, "rows")
WRONG = {
    "no mesh": (
        lambda: el.ParallelMap(jnp.sin, mesh="x"),
        "TypeError: ParallelMap: `mesh` must be a jax.sharding.Mesh … 'x', of type str",
    ),
    "a mesh and devices": (
        lambda: el.ParallelMap(jnp.sin, mesh=MESH, devices=jax.devices()),
        "ValueError: … a mesh or devices, not both",
    ),
    "no device": (
        lambda: el.ParallelMap(jnp.sin, devices=[0]),
        "TypeError: ParallelMap: `devices` … jax.devices() … 0, of type int",
    ),
    "no devices": (
        lambda: el.ParallelMap(jnp.sin, devices=[]),
        "ValueError: … `devices` is empty",
    ),
    "a device twice": (
        lambda: el.ParallelMap(jnp.sin, devices=jax.devices()[:1] * 2),
        "ValueError: … a device twice",
    ),
    "an unknown axis": (
        lambda: el.ParallelMap(jnp.sin, mesh=MESH, axis_name="c")(ONES),
        "ValueError: … axis_name='c' is not an axis of the mesh … 'a', 'b'",
    ),
    "one of several axes": (
        lambda: el.ParallelMap(jnp.sin, mesh=MESH)(ONES),
        "ValueError: … the mesh has the axes 'a', 'b' … axis_name=",
    ),
    "an axis that is split already": (
        lambda: el.ParallelMap(lambda x: el.ParallelMap(jnp.sin)(x))(ONES),
        "ValueError: … a map around this one … Use `Vmap` or `ChunkedVmap`",
    ),
    "nothing to map": (
        lambda: el.ParallelMap(lambda x: x)(1.0),
        "ValueError: ParallelMap: there is nothing to map over … x: 1.0",
    ),
    "different lengths": (
        lambda: el.ParallelMap(jnp.add)(ONES, jnp.ones(8)),
        "ValueError: ParallelMap: these lengths must all be the same … : 16 … : 8",
    ),
    "a result that is not the same": (
        lambda: el.ParallelMap(lambda x: {"y": x}, out_axes=None)(ONES),
        "ValueError: ParallelMap: out_axes gives None for results that depend … "
        "out['y']",
    ),
    "collectives of rows that the devices do not divide": (
        lambda: el.ParallelMap(SUM)(jnp.ones(9)),
        "ValueError: … over 'rows' … 9 rows for 8 devices … Change the number of rows",
    ),
    "collectives of rows in chunks": (
        lambda: el.ParallelMap(SUM, chunk_size=1)(ONES),
        "ValueError: … chunk_size=1 and each device has 2 rows … Leave out chunk_size",
    ),
    "collectives of rows in a budget": (
        lambda: el.ParallelMap(SUM, chunk_size=el.Budget("1MiB"))(ONES),
        "ValueError: … chunk_size=Budget … each device has 2 rows",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls(wrong):
    assert_raises(*WRONG[wrong])


def test_errors_of_f_tell_what_it_was_called_with():
    with pytest.raises(TypeError) as caught:
        el.ParallelMap(jnp.dot)(ONES, jnp.ones((16, 4)))
    (note, *_) = caught.value.__notes__
    assert "ParallelMap traced f on one row" in note
    assert "f32[4]" in note
