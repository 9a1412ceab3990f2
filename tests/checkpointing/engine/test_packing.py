"""Leaves that a step computes alike are packed: against `jax.lax.scan`, and counted."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el
from eqloop.checkpointing.engine import _packing

from ...asserts import assert_close
from ...compiling import temp_bytes
from ...derivatives import (
    forward_over_reverse,
    grad,
    inputs,
    mapped,
    reverse_over_reverse,
    vjp,
)
from ...marks import slow

COUNT = 12


@pytest.fixture(autouse=True)
def packs(monkeypatch):
    """Steps are packed as for a GPU, where fewer equations have to be spared."""
    monkeypatch.setattr(_packing, "_GAIN_ON_CPU", _packing._GAIN)


def ring(w, leaves, u):
    """Each leaf reads the next one: rows of a pack that are shifted."""
    pairs = zip(leaves, [*leaves[1:], leaves[0]], strict=True)
    return [a + 0.1 * w[0] * jnp.sin(b) + 0.01 * u[0] for a, b in pairs]


def gates(w, leaves, u):
    """Numbers that differ, `jnp.where`, and a leaf that all others are added to."""
    first, *others = leaves
    total, after = u[0], []
    for i, gate in enumerate(others):
        rate = 1 / (1 + jnp.exp(-(first + 0.1 * i)))
        gate = jnp.where(gate > 0.5 * i, gate - 0.1 * rate, gate + 0.1 * w[1] * rate)
        after.append(gate)
        total = total + 0.01 * gate * first
    return [jnp.tanh(total), *after]


def rates(w, leaves, u):
    """A const for each leaf: they are computed before the loop."""
    return [v - 0.1 * r * v * v for v, r in zip(leaves, w, strict=True)]


def kinds(w, leaves, u):
    """Two types of leaves, integers, and a large one that is in no pack."""
    *small, count, large = leaves
    small = [jnp.cos(v * w[0].astype(v.dtype) + u[0].astype(v.dtype)) for v in small]
    return [*small, count + 1, large * small[0] + jnp.mean(u)]


def start(step, h):
    leaves = [h[i % 4] * (0.5 + 0.1 * i) for i in range(COUNT)]
    if step is not kinds:
        return leaves
    more = [jnp.stack([v, v]).astype(jnp.float16) for v in leaves]
    large = h[0] * jnp.ones(400, h.dtype)
    return [*leaves, *more, jnp.zeros((), jnp.int32), large]


def run(step, loop, w, h, us):
    if step is rates:
        w = [w[i % 2] * (1 + 0.1 * i) for i in range(COUNT)]
    body = lambda leaves, u: (step(w, leaves, u), leaves[3] * u)
    leaves, ys = loop(body, start(step, h), us)
    # Halves are not close enough for derivatives of derivatives.
    return [v for v in leaves if v.dtype == h.dtype], ys


def scan(schedule):
    return lambda f, init, xs: el.Scan(f, schedule=schedule)(init, xs)


SCHEDULES = el.Binomial(3), el.Recursive(2), el.Chunked(3, batch=3), el.Chunked(2)


@pytest.mark.parametrize("mode", [grad, slow(mapped(vjp)), slow(forward_over_reverse)])
@pytest.mark.parametrize("at", [0, slow(1), 2, slow(3)])
def test_packed_leaves_have_the_derivatives_of_a_scan(at, mode):
    step = (ring, gates, rates, kinds)[at]
    actual, expected = (
        jax.jit(functools.partial(mode, functools.partial(run, step, loop)))(*inputs())
        for loop in (scan(SCHEDULES[at]), lax.scan)
    )
    assert_close(actual, expected, rtol=3e-4, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[:1])
def test_second_derivatives_in_reverse(schedule):
    actual, expected = (
        jax.jit(functools.partial(reverse_over_reverse, run_of))(*inputs())
        for run_of in (
            functools.partial(run, ring, f) for f in (scan(schedule), lax.scan)
        )
    )
    assert_close(actual, expected, rtol=3e-4, atol=3e-5)


def slots_written(step, schedule):
    """How many arrays the loops of a gradient write a row of, and the leaves of it."""
    loop = functools.partial(run, step, scan(schedule))
    program = jax.jit(functools.partial(grad, loop)).lower(*inputs()).as_text()
    return len(re.findall(r"dynamic_update_slice", program))


def test_a_pack_has_one_slot():
    # The sum of a step keeps the first leaf apart, and the others in one pack.
    few = slots_written(gates, el.Chunked(1))
    assert few <= 6


def test_slots_take_the_memory_of_one_array():
    # XLA gives each buffer 64 bytes at least.
    loss = lambda leaves: sum(jnp.sum(v * v) for v in leaves)
    body = lambda leaves, _: ([jnp.sin(v) for v in leaves], None)
    run = lambda leaves: loss(
        el.Scan(body, schedule=el.Chunked(1))(leaves, length=8)[0]
    )
    leaves = [jnp.float32(i) for i in range(60)]
    assert temp_bytes(jax.grad(run), leaves) < 8 * 60 * 16


def test_a_leaf_without_a_cotangent_has_no_influence():
    # The others overflow, and so do their derivatives: zero times infinity is no zero.
    w = jnp.float32(1)

    def loss(w, loop):
        body = lambda leaves, _: ([jnp.exp(w * v) for v in leaves], None)
        start = [jnp.float32(0.1), *[jnp.float32(50)] * (COUNT - 1)]
        return loop(body, start)[0]

    grad = jax.jit(jax.grad(lambda w: loss(w, _loop)))
    assert np.isfinite(grad(w))
    plain = lambda f, init: lax.scan(f, init, length=3)[0]
    np.testing.assert_allclose(
        grad(w), jax.grad(lambda w: loss(w, plain))(w), rtol=1e-5
    )


def _loop(f, init):
    return el.Scan(f, schedule=el.Binomial(2))(init, length=3)[0]


def test_a_plan_is_that_of_the_packed_step():
    body = lambda leaves, _: ([jnp.sin(v) for v in leaves], None)
    leaves = [jnp.float32(i) for i in range(COUNT)]
    plan = el.Scan(body, schedule=el.Binomial(3)).plan(leaves, length=9)
    assert plan.holds == (("carry[0] to carry[11]", True),)


@pytest.mark.parametrize("spec", [P(), P("d")])
def test_the_plan_of_leaves_on_several_devices_is_that_of_the_call(spec):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, spec))
    leaves = [place(jnp.full(8, 0.1 * i)) for i in range(COUNT)]
    body = lambda leaves, x: ([jnp.sin(v + x) for v in leaves], None)
    scan, xs = el.Scan(body, schedule=el.Binomial(3)), jnp.zeros(9)
    plan = scan.plan(leaves, xs)
    loss = lambda leaves: sum(map(jnp.sum, scan(leaves, xs)[0]))
    (run,) = el.plans(jax.grad(loss))(leaves)
    assert plan.holds == run.plan.holds == (("carry[0] to carry[11]", True),)
    # The call knows the types alone. So it counts the whole of what may be split.
    assert plan.peak_bytes < 1.01 * run.plan.peak_bytes


def test_what_is_differentiated_in_part_is_planned_as_it_is():
    """A pack has one cotangent, or none."""
    stop = lambda hs: [*map(lax.stop_gradient, hs[:-1]), hs[-1]]
    body = lambda hs, _: ([jnp.sin(h) for h in stop(hs)], None)
    scan = el.Scan(body, schedule=el.Binomial(3))
    leaves = [jnp.float32(i) for i in range(COUNT)]
    plan = scan.plan(leaves, length=9)
    (run,) = el.plans(jax.grad(lambda hs: sum(scan(hs, length=9)[0])))(leaves)
    assert plan.holds == run.plan.holds


def test_few_leaves_and_unlike_ones_are_left_as_they_are():
    body = lambda leaves, _: ([jnp.sin(v) for v in leaves], None)
    few = el.Scan(body, schedule=el.Binomial(3)).plan([0.1, 0.2, 0.3], length=9)
    assert len(few.holds) == 3
    powers = lambda leaves, _: ([v**i for i, v in enumerate(leaves, 2)], None)
    unlike = el.Scan(powers, schedule=el.Binomial(3))
    leaves = [jnp.float32(i) for i in range(COUNT)]
    assert len(unlike.plan(leaves, length=9).holds) == COUNT


# Constants of functions that are called, which are told apart by their bits: as they
# print, all of a kind are the same.


def middles(count):
    """Matrices that differ where they are not printed, as they are large."""
    found = np.zeros((count, 33, 33))
    found[:, 16, 16] = 0.1 + 0.1 * np.arange(count)
    return [m + 0.05 * np.eye(33, k=1) for m in found]


def last_digits(count):
    return [1 + np.full(2, 1e-10 * i) for i in range(count)]


def signs(count):
    return [np.full(2, 0.0 if i % 3 else -0.0) for i in range(count)]


def keys(count):
    return list(jax.random.split(jax.random.key(0), count))


def by_matrix(held, h):
    return jnp.tanh(held @ h)


def by_factor(held, h):
    return jnp.sin(held * h)


def by_sign(held, h):
    return h * jnp.copysign(0.5, held)


def by_noise(held, h):
    return h * jax.random.normal(held, h.shape, h.dtype)


HELD = {
    "the middles of matrices": (middles, by_matrix, 33, False),
    "last digits": (last_digits, by_factor, 2, True),
    "signs of zeros": (signs, by_sign, 2, True),
    "keys": (keys, by_noise, 2, False),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", HELD)
def test_constants_that_print_alike_are_others(name):
    make, f, size, is_packed = HELD[name]
    with jax.enable_x64(True):
        calls = [jax.jit(functools.partial(f, held)) for held in make(COUNT)]
        body = lambda hs, x: ([g(h) + x for g, h in zip(calls, hs, strict=True)], None)
        start = [jnp.linspace(0.1, 1, size) for _ in range(COUNT)]

        def gradient(scan):
            loss = lambda hs: sum(jnp.sum(h**2) for h in scan(body, hs, jnp.ones(4))[0])
            return jax.jit(jax.grad(loss))(start)

        planned = scan(el.Binomial(2))
        actual, expected = gradient(planned), gradient(lax.scan)
        # Apart from rounding: the gradients themselves differ by more than that.
        assert_close(actual, expected, rtol=1e-13, atol=1e-13)
        assert len({np.asarray(ct).tobytes() for ct in expected}) > 1
        plan = el.Scan(body, schedule=el.Binomial(2)).plan(start, jnp.ones(4))
        assert (len(plan.holds) == 1) == is_packed
