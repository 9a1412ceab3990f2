"""Segments that are run again side by side: what comes out, and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.checkpointing.planning._choice import _by_duration
from eqloop.checkpointing.planning._paces import paces

from ....compiling import temp_bytes
from ....marks import slow, slow_if
from ...memory import gradient
from ...noted import Noted
from ...side_by_side import Abreast
from ...steps import recurrent
from .products import (
    HS,
    MODES,
    XS,
    W,
    accumulated,
    assert_as_scan,
    network,
    of_loop,
    plain,
    two_in_one,
)

pytestmark = pytest.mark.sampled

SCHEDULES = [
    # All in one batch; in several; with segments left over; one by one.
    Abreast(2, 3, size=6),
    Abreast(3, 4, size=4),
    Abreast(2, 4, size=8),
    Abreast(3, 2),
    # Within another level.
    Abreast(2, 2, size=4, outer=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("step", [plain, two_in_one, slow(network), slow(accumulated)])
def test_gradients(step, schedule):
    assert_as_scan(step, schedule=schedule)


SETTINGS = {
    "reverse": dict(reverse=True),
    "unroll": dict(unroll=2),
    "policy": dict(policy=jax.checkpoint_policies.dots_saveable),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    assert_as_scan(two_in_one, schedule=SCHEDULES[2], **SETTINGS[name])
    assert_as_scan(plain, schedule=SCHEDULES[1], **SETTINGS[name])


@pytest.mark.parametrize("mode", slow_if("hessian".__ne__, list(MODES)[1:]))
def test_modes(mode):
    assert_as_scan(two_in_one, mode, SCHEDULES[0])


def assert_same_gradients(loss, *args):
    """Those by segments side by side, and those that store all residuals."""
    each = [jax.jit(loss(schedule)) for schedule in (SCHEDULES[0], el.StoreAll())]
    found, expected = (jax.tree.leaves(gradient(*args)) for gradient in each)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_keys_and_counters():
    def step(carry, x):
        h, count, key = carry
        key, own = jax.random.split(key)
        x = count.astype(x.dtype) * x + jax.random.normal(own, h.shape)
        return (jnp.tanh(W @ h + x), count + 1, key), None

    def loss(schedule):
        init = jnp.zeros((), int), jax.random.key(0)
        scan = el.Scan(step, schedule=schedule)
        return jax.grad(lambda h, xs: jnp.sum(scan((h, *init), xs)[0][0]), (0, 1))

    assert_same_gradients(loss, HS, XS)


def test_any_axis_of_xs():
    def loss(schedule):
        def run(w, xs):
            step = lambda h, x: plain(w, h, x["a"] + x["b"])
            scan = el.Scan(step, schedule=schedule, in_axes={"a": 0, "b": 1})
            return jnp.sum(scan(HS, xs)[0])

        return jax.grad(run, (0, 1))

    assert_same_gradients(loss, W, {"a": XS, "b": jnp.cos(XS.T)})


def test_a_loop_that_stops_runs_its_segments_one_by_one():
    counts = []

    def loss(schedule):
        def run(w, h, xs):
            near = lambda h: h[0] < 3
            step = lambda h, x: (h + 0.3 + 0.1 * jnp.sin(w @ h), None)
            loop = el.ScanWhile(near, step, max_steps=len(xs), schedule=schedule)
            h, _, steps = loop(h, xs)
            jax.debug.callback(lambda n: counts.append(int(n)), steps)
            return jnp.sum(jnp.sin(h))

        return jax.grad(run, (0, 1))

    assert_same_gradients(loss, W, 0 * HS, XS)
    jax.effects_barrier()
    assert counts
    assert all(2 < count < len(XS) - 2 for count in counts)


def test_no_budget_has_them_for_a_loop_that_stops():
    f, init, xs = recurrent(256)

    def has_them(make):
        asked = []
        make(Noted(el.Budget("64KiB", measure=False), asked)).plan(init, xs)
        problem, active, _ = asked[0]
        times = paces(problem, active, measure=False)
        return any(
            one.order.side_by_side > 1 for _, one in _by_duration(problem, times)
        )

    near = lambda h: h[0] < 9
    assert has_them(lambda schedule: el.Scan(f, schedule=schedule))
    assert not has_them(
        lambda schedule: el.ScanWhile(near, f, max_steps=256, schedule=schedule)
    )


def test_slots_of_lower_precision():
    exact, rounded = (
        jax.grad(of_loop(plain, schedule))(W, HS, XS)
        for schedule in (SCHEDULES[0], el.Cast(SCHEDULES[0], jnp.bfloat16))
    )
    assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


def test_the_error_of_a_debugger_says_which_step_it_was():
    # The derivative of the root of zero is not finite. Of thirteen steps, the last one
    # is by itself.
    step = lambda h, x: (1 + 0.1 * jnp.sqrt(h * (x - 8) ** 2), None)
    loss = lambda h: el.Scan(step, schedule=SCHEDULES[0])(h, jnp.arange(13.0))[0]
    with pytest.raises(el.NonFiniteError, match="iteration 8 of Scan"):
        el.DebugNonFinite(jax.grad(loss))(jnp.ones(()))


# What it takes.


def shapes(schedule):
    """The shapes of the products within a gradient."""
    text = jax.jit(jax.grad(of_loop(plain, schedule))).lower(W, HS, XS).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    return {line.split("-> tensor<")[1].split("xf32")[0] for line in lines}


def test_one_product_serves_all_segments():
    # Of six segments, two are left over.
    alone, side_by_side = (shapes(Abreast(2, count)) for count in (1, 4))
    assert {"16x4", "16x2"} <= side_by_side - alone


@pytest.mark.parametrize("side_by_side", [4, slow(16)])
def test_what_segments_take_is_counted(side_by_side):
    args = recurrent(1024, 64)
    plan = el.Scan(args[0], schedule=Abreast(8, side_by_side, size=32)).plan(*args[1:])
    found = temp_bytes(gradient(plan.pinned), *args)
    one = el.Scan(args[0], schedule=Abreast(8, 1, size=8)).plan(*args[1:])
    alone = temp_bytes(gradient(one.pinned), *args)
    carries = 4 * 64 * (plan._layout.order.slots - one._layout.order.slots)
    # The carries of all segments are there at once, with their `xs`, the carry that
    # each has reached, and what is carried back past the batch.
    assert carries <= found - alone <= 8 * carries
