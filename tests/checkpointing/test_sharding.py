"""Loops over states that are split over eight devices."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..compiling import temp_bytes
from ..marks import slow
from ..schedules import BLOCKS, LAST, NESTED

DEVICES = 8
LENGTH, WIDTH = 9, 16

SCHEDULES = (NESTED, BLOCKS, LAST)

# What moves data between devices; that plain `lax.scan` reduces gradients is known.
MOVES = re.compile(r"(all-gather|all-to-all|collective-permute|collective-broadcast)")


def dense(w: Any, h: Any, x: Any) -> Any:
    """A step of a batch of states, each on one device."""
    return jnp.tanh(h @ w + x)


def stencil(w: Any, h: Any, x: Any) -> Any:
    """A step of one field whose ends lie on other devices."""
    return h + 0.1 * w[0, 0] * (jnp.roll(h, 1, 0) - 2 * h + jnp.roll(h, -1, 0)) + x


def scan(schedule: Any) -> Callable[..., Any]:
    return lambda f, init, xs: el.Scan(f, schedule=schedule)(init, xs)


def gradient(step: Any, loop: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, h: Any, xs: Any) -> jax.Array:
        f = lambda h, x: (step(w, h, x), None)
        return jnp.sum(loop(f, h, xs)[0] ** 2)

    return jax.grad(loss, (0, 1, 2))


def inputs(mesh: Any = None) -> tuple[Any, ...]:
    """`w` on every device; `h` and `xs` split along their batch."""
    numbers = functools.partial(np.random.default_rng(0).normal, scale=0.3)
    arrays = [numbers(size=size).astype("f4") for size in SIZES]
    if mesh is None:
        return tuple(arrays)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return tuple(map(place, arrays, SPECS))


SIZES = ((WIDTH, WIDTH), (2 * DEVICES, WIDTH), (LENGTH, 2 * DEVICES, WIDTH))
SPECS = (P(), P("batch"), P(None, "batch"))


def mesh_of(axis_type: AxisType) -> Any:
    return jax.make_mesh((DEVICES,), ("batch",), axis_types=(axis_type,))


@functools.cache
def expected(step: Any) -> Any:
    return jax.jit(gradient(step, jax.lax.scan))(*inputs())


@functools.cache
def moves_of_lax_scan(step: Any, axis_type: AxisType) -> frozenset[str]:
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        return moves(jax.jit(gradient(step, jax.lax.scan)), *inputs(mesh))


def moves(f: Any, *args: Any) -> frozenset[str]:
    """The kinds of operations that move data, in the compiled program."""
    return frozenset(MOVES.findall(f.lower(*args).compile().as_text()))


@pytest.mark.parametrize(
    ("step", "axis_type", "schedule"),
    [
        slow(dense, AxisType.Auto, SCHEDULES[0]),
        slow(dense, AxisType.Auto, SCHEDULES[1]),
        slow(dense, AxisType.Explicit, SCHEDULES[0]),
        (dense, AxisType.Explicit, SCHEDULES[1]),
        # `jnp.roll` has no rule for explicit axes.
        slow(stencil, AxisType.Auto, SCHEDULES[0]),
        (stencil, AxisType.Auto, SCHEDULES[1]),
    ],
)
def test_a_state_stays_where_it_is(step, axis_type, schedule):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        run = jax.jit(gradient(step, scan(schedule)))
        args = inputs(mesh)
        assert moves(run, *args) <= moves_of_lax_scan(step, axis_type)
        actual = run(*args)
    for a, e, spec in zip(actual, expected(step), SPECS, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


def test_the_comparison_sees_moves():
    assert not moves_of_lax_scan(dense, AxisType.Auto)
    assert "collective-permute" in moves_of_lax_scan(stencil, AxisType.Auto)


def test_slots_are_split_as_the_state_is():
    schedule = el.Binomial(3)
    mesh = mesh_of(AxisType.Auto)
    run = jax.jit(gradient(dense, scan(schedule)))
    rows = 1024
    shapes = ((WIDTH, WIDTH), (rows, WIDTH), (LENGTH, rows, WIDTH))

    def temporary(*specs: P) -> int:
        args = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        return temp_bytes(run, *args)

    assert temporary(*SPECS) < temporary(P(), P(), P()) / DEVICES * 1.5


def test_shard_map():
    """Each device runs a loop of its own; the gradient of `w` is summed over them."""
    schedule = el.Binomial(3)
    mesh = mesh_of(AxisType.Auto)

    def loss(w: Any, h: Any, xs: Any) -> jax.Array:
        f = lambda h, x: (dense(w, h, x), None)
        last, _ = scan(schedule)(f, h, xs)
        return jax.lax.psum(jnp.sum(last**2), "batch")

    split = jax.shard_map(loss, mesh=mesh, in_specs=SPECS, out_specs=P())
    run = jax.jit(jax.grad(split, (0, 1, 2)))
    assert not moves(run, *inputs(mesh))
    for a, e in zip(run(*inputs(mesh)), expected(dense), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", [el.Chunked(2), el.StoreAll()], ids=str)
def test_no_steps_on_several_devices(schedule):
    """A step may return what is the same on all devices, if it is never run."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=P("rows"), out_specs=(P("rows"), P(None, "rows")))

    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def run(x: jax.Array) -> Any:
        step = lambda h, _: (jnp.zeros(x.shape), h)
        return el.Scan(step, schedule=schedule)(x, None, length=0)

    last, ys = run(jnp.arange(4.0))
    assert last.tolist() == [0, 1, 2, 3]
    assert (ys.shape, ys.dtype) == ((0, 4), jnp.float32)
