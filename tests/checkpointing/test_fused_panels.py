"""Kernels of recurrent cells: matrices in shared memory, and products by tensor cores.

They are run by the interpreter that Pallas's backend Mosaic GPU has, on a CPU.
"""

import functools
import math
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu

import eqloop as el
from eqloop._compat import HAS_MOSAIC_GPU
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._levels import nests
from eqloop.checkpointing.fused import _panel_rooms, _runner
from eqloop.checkpointing.fused._choice import Kernel
from eqloop.checkpointing.fused._lowered import lowered
from eqloop.checkpointing.fused._nests import usual_nests
from eqloop.checkpointing.fused._panel_block import PanelBlock, _segment, parts_of
from eqloop.checkpointing.fused._panel_kernels import PanelLoop
from eqloop.checkpointing.fused._panel_rooms import PanelRooms
from eqloop.checkpointing.fused._panels import NotPanelsError, Panels
from eqloop.checkpointing.fused._runner import FusedRunner

from ..asserts import assert_close, assert_same
from ..marks import slow
from .fused_loops import use_settings

pytestmark = pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="a later backend")

ROWS, STEPS, UNITS = 66, 5, 32
FUSED = el.Fused(2, interpret=True)


@pytest.fixture(autouse=True)
def _panels(monkeypatch):
    use_settings(monkeypatch, mosaic=True, panels=True)


def gru(inputs, dtype):
    cell = eqx.nn.GRUCell(inputs, UNITS, key=jax.random.key(0), dtype=dtype)
    return cell, lambda cell, h, x: (cell(x, h),) * 2


def lstm(inputs, dtype):
    cell = eqx.nn.LSTMCell(inputs, UNITS, key=jax.random.key(0), dtype=dtype)

    def step(cell, state, x):
        state = cell(x, state)
        return state, state[0]

    return cell, step


def normalised(inputs, dtype):
    """A minimal cell of two layers, with a normalisation and a mask."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (UNITS, inputs + UNITS), (UNITS, UNITS), (UNITS,)
    weights = [
        (jax.random.normal(k, s) * 0.3).astype(dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]

    def step(weights, h, x):
        inner, outer, scale = weights
        y = inner @ jnp.concatenate([x, h])
        y = y - jnp.mean(y)
        y = y * lax.rsqrt(jnp.mean(y**2) + 1e-3) * scale
        new = h + 0.5 * (jnp.tanh(outer @ jax.nn.relu(y)) - h)
        return jnp.where(jnp.sum(x) > -1, new, h), None

    return weights, step


def vectors(inputs, dtype):
    """A step that multiplies by no matrix: its units see sums over them."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(k, (UNITS,)).astype(dtype) * 0.5 for k in keys]

    def step(weights, h, x):
        slope, of_x, scale = weights
        y = jnp.tanh(slope * h + of_x * (jnp.sum(x) + scale @ h))
        y = (y - jnp.mean(y)) * jax.nn.softmax(h)
        new = h + 0.1 * (y * lax.rsqrt(jnp.mean(y**2) + 1e-3) * scale - h)
        return new, (h @ new, jnp.max(new), jnp.min(h))

    return weights, step


def start_of(name, dtype):
    h = (jax.random.normal(jax.random.key(1), (ROWS, UNITS)) * 0.5).astype(dtype)
    return (h, h * 0.3) if name is lstm else h


def all_of(name, inputs, dtype, schedule, reverse=False):
    """The values and the gradient of a loop."""
    cell, step = name(inputs, dtype)
    xs = jax.random.normal(jax.random.key(2), (ROWS, STEPS, inputs)).astype(dtype)

    def run(cell, h, xs):
        step_of = functools.partial(step, cell)
        return el.Scan(step_of, reverse=reverse, schedule=schedule)(h, xs)

    def loss(cell, h, xs):
        made = jax.vmap(run, (None, 0, 0))(cell, h, xs)
        weigh = lambda x: jnp.sum(jnp.cos(jnp.arange(x.size)).reshape(x.shape) * x)
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(made)]
        return sum(map(weigh, leaves)), made

    of = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, made), gradient = jax.jit(of)(cell, start_of(name, dtype), xs)
    return made, gradient


def check(name, inputs, dtype="float32", reverse=False, most=3e-4):
    every = [
        jax.tree.leaves(all_of(name, inputs, dtype, schedule, reverse))
        for schedule in (FUSED, el.StoreAll())
    ]
    for a, b in zip(*every, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.max(np.abs(a - b)) <= most * max(np.max(np.abs(b)), 1e-3)


def test_a_gru_is_what_it_is_without_a_kernel():
    check(gru, 16)


def test_its_value_alone_is_too():
    cell, step = normalised(16, "float32")
    h, xs = start_of(normalised, "float32"), jnp.ones((ROWS, 3, 16))
    run = lambda s, h, x: el.Scan(functools.partial(step, cell), schedule=s)(h, x)[0]
    made = (jax.vmap(functools.partial(run, s))(h, xs) for s in (FUSED, el.StoreAll()))
    assert_close(*made, rtol=3e-4, atol=3e-4)


def test_on_a_gpu_it_says_that_none_has_run_there(monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", is_here=True)
    monkeypatch.setattr(_runner, "planning_device", lambda: gpu)
    cell, step = normalised(16, "float32")
    h, xs = start_of(normalised, "float32"), jnp.ones((ROWS, 1, 16))
    run = el.Scan(functools.partial(step, cell), schedule=FUSED)
    with pytest.warns(UserWarning, match="none has run on such a device yet: compare"):
        jax.jit(jax.vmap(run)).lower(h, xs)


def test_a_plan_for_a_cpu_says_that_it_is_a_kernel_on_hopper():
    cell, step = gru(16, "float32")
    h, xs = start_of(gru, "float32"), jnp.ones((ROWS, 9, 16))
    run = el.Scan(functools.partial(step, cell), schedule=el.Fused())
    (loop,) = el.plans(jax.grad(lambda h: jnp.sum(jax.vmap(run)(h, xs)[0])))(h)
    assert "On a GPU: one each way with a row in several threads" in loop.plan.kernel
    assert loop.plan.kernel.endswith("; that is on Hopper")


@pytest.mark.slow
@pytest.mark.parametrize("name", [lstm, normalised])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_are_other_cells(name, dtype):
    check(name, 16, dtype, most=3e-4 if dtype == "float32" else 3e-2)


def test_so_is_a_step_without_matrices():
    check(vectors, 2)


@pytest.mark.parametrize("units", [UNITS, UNITS - 1])
def test_it_is_one_of_panels_if_its_vectors_are_long(monkeypatch, units):
    step = lambda h, x: (h - 0.1 * jnp.mean(jnp.sin(h)) * x, None)
    run = lambda h, xs: el.Scan(step, schedule=FUSED)(h, xs)[0]
    of = jax.grad(lambda h, xs: jnp.sum(jax.vmap(run)(h, xs)))
    found, call = list[PanelLoop](), PanelLoop.__call__
    told = lambda self, *args, **more: found.append(self) or call(self, *args, **more)
    monkeypatch.setattr(PanelLoop, "__call__", told)
    jax.jit(of).lower(jnp.ones((ROWS, units)), jnp.ones((ROWS, 4)))
    assert [bool(loop.again) for loop in found] == [False, True] * (units == UNITS)


def test_it_goes_in_reverse_too():
    check(normalised, 20, reverse=True)


def test_what_has_no_room_in_shared_memory_is_added_up_in_memory(monkeypatch):
    totals = PanelRooms.totals.func
    outside = lambda of: {n: (count, 0) for n, (count, _) in totals(of).items()}
    monkeypatch.setattr(PanelRooms, "totals", property(outside))
    check(normalised, 16)


def narrowed(monkeypatch, room):
    """Has less shared memory, and notes of which size parts of matrices are copied."""
    copied, copy = set(), PanelBlock._copy
    monkeypatch.setattr(_panel_rooms, "_MOST_SHARED", room * 1024)

    def noting(self, factor, *args):
        if factor.key not in self._matrices:
            copied.add((factor.sizes, factor.axis))
        return copy(self, factor, *args)

    monkeypatch.setattr(PanelBlock, "_copy", noting)
    return copied


@pytest.mark.parametrize(
    ("room", "of_each"), [(84, {(32, 32), (32, 16)}), slow(90, {(32, 16)})]
)
def test_matrices_without_room_are_copied_at_each_product(monkeypatch, room, of_each):
    copied = narrowed(monkeypatch, room)
    check(gru, 16)
    # Both ways, but for one that stays there.
    assert {size for size, _ in copied} >= of_each
    assert {axis for _, axis in copied} == {0, 1}


def test_where_the_way_there_alone_has_room_the_way_back_is_a_loop(monkeypatch):
    copied, back = narrowed(monkeypatch, 60), list[str]()
    reverse = FusedRunner.reverse

    def noting(self, *args):
        back.append("kernel" if (made := reverse(self, *args)) else "loop")
        return made

    monkeypatch.setattr(FusedRunner, "reverse", noting)
    check(gru, 16)
    assert (copied, back) == (set(), ["loop"])


def test_a_plan_says_why_the_way_back_is_a_loop():
    kernel = Kernel(Layout(AllAtOnce(8)), math.nan, why_loop_back="it has no room")
    said = kernel.described("one each way")
    assert said == "one each way; its way back is a loop, as it has no room"


@pytest.mark.parametrize("units", [64, slow(128)])
def test_two_groups_of_warps_have_half_of_the_units_each(monkeypatch, units):
    """Each has a thread of the interpreter, of which there are as many as devices.

    It raises if one reads what another has not waited for.
    """
    strict = functools.partial(mosaic_gpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic_gpu, "InterpretGPUParams", strict)
    monkeypatch.setattr(f"{__name__}.UNITS", units)
    check(gru, 16)


def test_a_cell_that_is_too_large_says_what_to_do():
    cell = eqx.nn.GRUCell(16, 1024, key=jax.random.key(0))

    def loss(cell, h, xs):
        step = lambda h, x: (cell(x, h), None)
        run = lambda h, xs: el.Scan(step, schedule=FUSED)(h, xs)[0]
        return jnp.sum(jax.vmap(run)(h, xs))

    (loop,) = el.plans(jax.grad(loss))(
        cell, jnp.ones((64, 1024)), jnp.ones((64, 4, 16))
    )
    assert loop.plan.kernel.startswith("none: a row carries 1024 numbers, too many")
    assert "KiB of 224; fewer units take less" in loop.plan.kernel


def test_what_each_row_has_of_its_own_has_a_cotangent():
    cell, step = normalised(16, "float32")
    h, own, xs = (
        jnp.ones((ROWS, *shape)) * 0.1 for shape in ((UNITS,), (16,), (3, 16))
    )

    def loss(schedule, cell, own, h, xs):
        def run(own, h, xs):
            of = lambda h, x: step(cell, h, x * own)
            return el.Scan(of, schedule=schedule)(h, xs)[0]

        return jnp.sum(jax.vmap(run)(own, h, xs) ** 2)

    of = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    every = [jax.tree.leaves(of(s, cell, own, h, xs)) for s in (FUSED, el.StoreAll())]
    for a, b in zip(*every, strict=True):
        assert_close(a, b, rtol=3e-3, atol=3e-4 * np.max(np.abs(b)))


@pytest.mark.parametrize("nests", [nests(9, 3), usual_nests(10, 4), nests(1, 2)])
def test_segments_are_found_by_their_number(nests):
    found = [_segment(nests, i) for i in range(sum(n.levels[0] for n in nests))]
    starts = [int(first) for first, _ in found]
    assert starts == [sum(int(n) for _, n in found[:i]) for i in range(len(found))]
    assert sum(int(n) for _, n in found) == sum(n.length for n in nests)


def panels_of(f, *shapes, own):
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Panels(lowered(jax.make_jaxpr(f)(*types)), own, range(0))


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda w, h: jnp.flip(h, 1), "`rev` at .* is not for units"),
        (lambda w, h: jnp.tanh(h.T @ h), "a row has an array of shape"),
        (lambda w, h: h @ (h.T @ h), "`dot_general` at .* multiplies a matrix of each"),
        (lambda w, h: jnp.sum(h > 0), "a sum, or the like, of numbers of int32"),
        (lambda w, h: h[:, ::2], "`slice` at .* takes single units"),
        (lambda w, h: h[:, 2:3], "`slice` at .* takes single units"),
        (lambda w, h: h[:, :1] * w[:1] @ w.T, "`slice` at .* takes single units"),
    ],
)
def test_what_is_not_for_units_is_said(f, why):
    with pytest.raises(NotPanelsError, match=why):
        panels_of(f, (8, 8), (1, 8), own=[1])


def test_gates_are_parts_of_one_product():
    def f(w, b, h, x):
        gates = h @ w[:8] + b[None] + x @ w[8:]
        reset, update = jnp.split(gates, 2, 1)
        return jnp.concatenate([reset * h, jnp.tanh(update)], 1)

    panels = panels_of(f, (12, 16), (16,), (1, 8), (1, 4), own=[2, 3])
    reset, update = panels.wide(panels.outs[0])
    assert (reset.width, update.width) == (8, 8)
    product, bias = reset.panels[0].panels
    assert (product.kind, bias.kind) == ("product", "same")
    # One for each of the vectors that is multiplied.
    assert {factor.sizes for factor in product.factors} == {(8, 8), (4, 8)}
    assert {factor.starts for factor in product.factors} == {(0, 0)}


def test_numbers_of_float32_are_sums_of_narrow_ones():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    for count, bits in ((2, 16), (3, 23)):
        total = sum(part.astype(jnp.float32) for part in parts_of(x, count))
        assert np.max(np.abs(total / x - 1)) < 2.0**-bits
    odd = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0])
    total = sum(part.astype(jnp.float32) for part in parts_of(odd, 2))
    assert_same(total, odd)


@pytest.mark.slow
def test_so_are_gradients_of_each_row_and_second_derivatives():
    cell, step = gru(16, "float32")
    h, xs = start_of(gru, "float32"), jnp.ones((ROWS, 2, 16))

    def loss(schedule, cell, h, xs):
        run = lambda h, xs: el.Scan(functools.partial(step, cell), schedule=schedule)(
            h, xs
        )
        return jnp.sum(jax.vmap(run)(h, xs)[0] ** 2)

    def each(schedule):
        of = jax.grad(functools.partial(loss, schedule), (1, 2))
        return jax.vmap(lambda h, x: of(cell, h[None], x[None]))(h, xs)

    def second(schedule):
        of = jax.grad(functools.partial(loss, schedule), (0, 1))
        return jax.jvp(of, (cell, h, xs), (cell, h, xs))

    for f in (each, second):
        every = [
            jax.tree.leaves(jax.jit(f, static_argnums=0)(s))
            for s in (FUSED, el.StoreAll())
        ]
        for a, b in zip(*every, strict=True):
            assert_close(a, b, rtol=3e-3, atol=3e-4 * np.max(np.abs(b)))
