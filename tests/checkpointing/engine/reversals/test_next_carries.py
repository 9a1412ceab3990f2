"""Batches of steps that are linearised by the carries after them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing import trace_step
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.reversals._next_carries import given_leaves
from eqloop.checkpointing.planning._work import rates

from ....compiling import temp_bytes
from ....marks import slow, slow_if
from ..storing import Storing
from .products import (
    HS,
    INPUTS,
    MODES,
    WIDTH,
    XS,
    W,
    accumulated,
    assert_equal,
    gradient,
    of_loop,
    plain,
)

pytestmark = pytest.mark.sampled


def within(w, h, x):
    """The inner product is still needed."""
    return jax.nn.sigmoid(w @ jnp.tanh(w.T @ h + x)), None


def gated(w, h, x):
    """The result of `tanh` is no leaf of the carry."""
    return 0.5 * h + jnp.tanh(w @ h + x), None


STEPS = [plain, within, accumulated]


@dataclasses.dataclass(frozen=True)
class InParts(el.AbstractSchedule):
    """Segments of another schedule, each of which stores all of its carries."""

    def layout(self, loop):
        return loop.cut([(6, el.Chunked(6, batch=3)), (7, el.Chunked(7, batch=7))])


def nested(*levels, size):
    """Nests of these levels, and batches of this size."""
    return Storing(tuple(map(Nest, levels)), with_products=0, size=size)


SCHEDULES = [
    el.Chunked(13, batch=13),
    el.Chunked(13, batch=4),
    el.Chunked(4, batch=4),
    el.Recursive(4, batch=4),
    el.Binomial(3, block=3),
    # All carries of some steps are stored, and others are run again.
    nested((2, 4), (5,), size=3),
    nested((4,), (9,), size=4),
    # Several batches are run again at a time.
    nested((2, 6), (1,), size=3),
    InParts(),
]


def assert_as_scan(step, mode="gradient", schedule=SCHEDULES[0], **settings):
    inputs = INPUTS.get(mode, (W, HS, XS))
    plain = {k: v for k, v in settings.items() if k == "reverse"}
    runs = of_loop(step, schedule, **settings), of_loop(step, **plain)
    assert_equal(*(jax.jit(MODES[mode](run))(*inputs) for run in runs))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_gradients(step, schedule):
    assert_as_scan(step, schedule=schedule)


@pytest.mark.parametrize("mode", slow_if("hessian".__ne__, list(MODES)[1:]))
@pytest.mark.parametrize("step", [within, slow(accumulated)])
def test_modes(step, mode):
    assert_as_scan(step, mode)
    assert_as_scan(step, mode, el.Recursive(4, batch=4))


@pytest.mark.parametrize(
    "settings", [dict(reverse=True), slow(dict(unroll=2))], ids=lambda s: next(iter(s))
)
def test_settings(settings):
    assert_as_scan(within, **settings)


def products(step, schedule, length=12):
    """How many products the program of a gradient has."""
    run = jax.jit(gradient(of_loop(step, schedule)))
    return run.lower(W, HS, XS[:length]).compile().as_text().count(" dot(")


@pytest.mark.parametrize(
    ("step", "forward", "backward"),
    # Of two, one cotangent is computed step by step, and for the weights again.
    [(plain, 1, 2), (within, 2, 5), (accumulated, 1, 2)],
)
def test_products_before_the_carry_are_not_computed_again(step, forward, backward):
    # An inner one is.
    linearised = forward - 1
    least = forward + linearised + backward
    assert products(step, el.Chunked(12, batch=4)) == least
    # Where steps are run again for several batches.
    assert products(step, nested((2, 6), size=3)) == least + forward


def test_elsewhere_all_products_are_computed_again():
    assert products(gated, el.Chunked(12, batch=4)) == 1 + 1 + 2
    # Carries of lower precision are not what a step returns.
    lower = el.Cast(el.Chunked(12, batch=4), jnp.bfloat16)
    assert products(plain, lower) == 1 + 1 + 2


@pytest.mark.parametrize(
    "schedule",
    [el.Chunked(64, batch=8), nested((4, 16), size=8)],
    ids=["flat", "nested"],
)
def test_it_takes_no_more_than_a_carry(schedule):
    w, h, xs = jnp.zeros((32, 32)), jnp.zeros(32), jnp.zeros((64, 32))
    taken = lambda f: temp_bytes(gradient(of_loop(f, schedule)), w, h, xs)
    assert taken(plain) <= taken(gated) + 32 * 4


@pytest.mark.parametrize(
    ("f", "is_given"),
    [
        (jnp.tanh, True),
        (jax.nn.sigmoid, True),
        (jnp.exp, True),
        (jnp.sin, False),
        (jax.nn.relu, False),
        # The function and its derivative are one equation.
        (jax.nn.softplus, False),
        (lambda x: x.astype(int).astype(x.dtype), False),
    ],
)
def test_what_is_given(f, is_given):
    types = [jax.ShapeDtypeStruct((16,), jnp.float32)]
    step, _ = trace_step(lambda h, x: ([f(W @ h[0] + x[0])], []), types, types)
    assert given_leaves(step)[0] == ((0,) if is_given else ())


def test_leaves_that_are_the_same_value():
    types = [jax.ShapeDtypeStruct((16,), jnp.float32)] * 2
    twice = lambda h, x: ([after := jnp.tanh(W @ h[0] + h[1]), after], [])
    step, _ = trace_step(twice, types, types)
    assert given_leaves(step)[0] == (0,)


def test_double_precision():
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: x.astype(jnp.float64), (W, HS, XS))
        runs = of_loop(within, SCHEDULES[1]), of_loop(within)
        assert_equal(*(jax.jit(gradient(run))(*inputs) for run in runs), rtol=1e-12)


def test_an_estimate_counts_them():
    def spared(step):
        scan = el.Scan(functools.partial(step, W), schedule=el.Chunked(13, batch=4))
        return scan.plan(HS, XS)._cost.spared

    assert spared(gated) == 0
    assert spared(plain) >= 2 * WIDTH**2 * rates().flop
