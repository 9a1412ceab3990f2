"""A budget is what one device may take: of arrays that are split over eight of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

import eqloop as el
from eqloop._arrays import nbytes
from eqloop.checkpointing.planning import _paces, _trials

from ..mapping.devices import DEVICES, explicit_mesh_of, mesh_of

pytestmark = pytest.mark.sampled

WIDTH, ROWS, STEPS = 8, 64, 300


def cell(weight, h, x):
    return jnp.tanh(jnp.tanh(h @ weight + x) @ weight), None


def gradient(schedule):
    def loss(weight, h, xs):
        f = jax.tree_util.Partial(cell, weight)
        return jnp.sum(el.Scan(f, schedule=schedule)(h, xs)[0] ** 2)

    return jax.grad(loss, (0, 1, 2))


def arrays(rows):
    h = jnp.ones((rows, WIDTH))
    return jnp.eye(WIDTH), h, jnp.ones((STEPS, rows, WIDTH))


SPECS = jax.P(), jax.P("b"), jax.P(None, "b")


def split(mesh: Mesh) -> list[Any]:
    """The arrays of all devices."""
    pairs = zip(arrays(DEVICES * ROWS), SPECS, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def temp(f, *args) -> int:
    analysis: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def by_types(budget):
    args = split(explicit_mesh_of(b=DEVICES))
    run = gradient(budget)
    return el.plans(run)(*args)[0].plan, temp(run, *args)


def by_shard_map(budget):
    run = jax.shard_map(
        lambda *own: gradient(budget)(*own),
        mesh=mesh_of(b=DEVICES),
        in_specs=SPECS,
        out_specs=SPECS,
    )
    args = split(mesh_of(b=DEVICES))
    return el.plans(run)(*args)[0].plan, temp(run, *args)


def by_plan(budget):
    weight, *args = split(mesh_of(b=DEVICES))
    scan = el.Scan(jax.tree_util.Partial(cell, weight), schedule=budget)
    plan = scan.plan(*args)
    return plan, temp(gradient(plan.pinned), weight, *args)


def by_plan_of_types(budget):
    weight, *args = split(mesh_of(b=DEVICES))
    type_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    scan = el.Scan(jax.tree_util.Partial(cell, type_of(weight)), schedule=budget)
    plan = scan.plan(*map(type_of, args))
    return plan, temp(gradient(plan.pinned), weight, *args)


@functools.cache
def of_one_device(size):
    return temp(gradient(el.Budget(size, measure=False)), *arrays(ROWS))


@pytest.mark.parametrize("how", [by_types, by_shard_map, by_plan, by_plan_of_types])
@pytest.mark.parametrize("size", [40_000, 150_000])
def test_eight_devices_take_what_one_takes_for_its_share(how, size):
    plan, of_each = how(el.Budget(size, measure=False))
    assert of_each <= plan.peak_bytes <= size
    assert plan.slot_bytes == ROWS * WIDTH * 4
    # It uses what it may, as that of one device does.
    own = arrays(ROWS)
    assert of_each == pytest.approx(temp(gradient(plan.pinned), *own), rel=0.15)
    assert of_each > 0.85 * of_one_device(size)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_all_plans_of_a_function_of_split_arrays(wrap):
    # They are the plans that will run, which do not know how arrays are split. Their
    # bytes are those of one device.
    args, run = split(mesh_of(b=DEVICES)), wrap(gradient(el.Recursive(16)))
    found = el.plans(run)(*args)
    whole = el.plans(run)(*arrays(DEVICES * ROWS))
    assert found[0].plan.slot_bytes == ROWS * WIDTH * 4
    assert found[0].plan.pinned == whole[0].plan.pinned
    assert temp(run, *args) <= found.peak_bytes < whole.peak_bytes / 4


def test_all_plans_of_a_function_in_a_shard_map():
    """Plans trace its loops once more, among its axes."""
    run = jax.shard_map(
        lambda *own: gradient(el.Recursive(16))(*own),
        mesh=mesh_of(b=DEVICES),
        in_specs=SPECS,
        out_specs=SPECS,
    )
    args = split(mesh_of(b=DEVICES))
    found = el.plans(run)(*args)
    own = el.plans(gradient(el.Recursive(16)))(*arrays(ROWS))
    assert found[0].plan.pinned == own[0].plan.pinned
    assert found.peak_bytes == pytest.approx(own.peak_bytes, rel=0.1)


def test_a_split_step_whose_products_may_be_stored():
    """They are of no less than 16 terms."""
    mesh, weight = mesh_of(b=DEVICES), jnp.eye(16)
    scan = el.Scan(lambda h, x: cell(weight, h, x), schedule=el.Recursive(16))
    init, xs = jnp.ones((ROWS, 16)), jnp.ones((STEPS, ROWS, 16))
    place = lambda x, axis, spec: jax.device_put(
        jnp.concatenate([x] * DEVICES, axis), NamedSharding(mesh, spec)
    )
    found = scan.plan(place(init, 0, SPECS[1]), place(xs, 1, SPECS[2]))
    own = scan.plan(init, xs)
    assert found.pinned == own.pinned
    assert found.peak_bytes == pytest.approx(own.peak_bytes, rel=0.2)


@pytest.mark.slow
def test_a_frontier_of_split_arrays_is_that_of_one_device():
    weight, *args = split(mesh_of(b=DEVICES))
    scan = el.Scan(jax.tree_util.Partial(cell, weight), schedule=el.Recursive(16))
    frontier = scan.frontier(*args)
    assert frontier.chosen.slot_bytes == ROWS * WIDTH * 4
    own = el.Scan(jax.tree_util.Partial(cell, weight)).plan(*arrays(ROWS)[1:])
    assert frontier[-1].peak_bytes < 1.15 * own.peak_bytes
    assert not any(plan.is_measured for plan in frontier)


@pytest.mark.parametrize("how", [by_types, by_plan])
def test_what_is_split_is_not_run_on_one_device(how, monkeypatch):
    programs = []

    def times(run, _):
        programs.extend(run)
        return [(1e6, 0.0)] * len(run)

    monkeypatch.setattr(_trials, "_best_times", times)
    monkeypatch.setattr(_paces, "_is_quick", lambda *_: False)
    el.measurements(None)
    plan, _ = how(el.Budget(40_000))
    assert not plan.is_measured
    assert not programs
    # One device is measured by the same means.
    el.plans(gradient(el.Budget(40_000)))(*arrays(ROWS))
    assert programs


def test_what_splits_the_rows_of_a_leaf_that_does_not_change():
    """Leaves that become consts and contents of references keep their places."""
    mesh = mesh_of(b=DEVICES)
    rows = jnp.ones((DEVICES * ROWS, WIDTH))
    halves = jax.device_put(rows, NamedSharding(mesh, jax.P("b")))
    scan = el.Scan(
        lambda c, x: ((c[0], jnp.sin(c[1] + c[0] + x)), None),
        schedule=el.Chunked(8),
    )
    of = lambda *init: scan.plan(init, jnp.ones((STEPS, 1, 1)))
    both, second, first = of(halves, halves), of(rows, halves), of(halves, rows)
    assert both.slot_bytes == second.slot_bytes == ROWS * WIDTH * 4
    assert first.slot_bytes == DEVICES * ROWS * WIDTH * 4
    # Of what is not split, the compiler decides how it is, as it does when it is run.
    assert both.peak_bytes <= second.peak_bytes < of(rows, rows).peak_bytes / 4


def test_a_loop_that_stops_is_planned_for_one_device():
    mesh = mesh_of(b=DEVICES)
    weight, h, xs = split(mesh)
    step = jax.tree_util.Partial(cell, weight)
    loop = el.ScanWhile(
        lambda h: jnp.sum(h) < 0, step, max_steps=STEPS, schedule=el.Chunked(8)
    )
    assert loop.plan(h, xs).slot_bytes == ROWS * WIDTH * 4


def test_the_bytes_of_a_type_are_those_of_one_device():
    mesh = explicit_mesh_of(a=4, b=2)
    types = []
    for spec in (jax.P(), jax.P("a"), jax.P(None, ("a", "b"))):
        placed = NamedSharding(mesh, spec)
        types.append(jax.typeof(jax.device_put(jnp.ones((16, 8)), placed)))
    assert [nbytes([aval]) for aval in types] == [512, 128, 64]
