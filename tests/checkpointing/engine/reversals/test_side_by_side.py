"""Segments that are run again side by side: what comes out, and what it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ....marks import slow, slow_if
from ....weights import normal
from ...abreast import Abreast
from ...memory import gradient, temp_bytes
from ...steps import recurrent

pytestmark = pytest.mark.sampled

W, H = jnp.asarray(normal(0, (4, 4), scale=0.4)), jnp.linspace(-1, 1, 4)
XS = jnp.sin(jnp.arange(23 * 4.0)).reshape(23, 4)


def plain(w, h, x):
    return jnp.tanh(w @ h + x), None


def with_outputs(w, h, x):
    z = w @ jnp.tanh(w @ h + x)
    return h + 0.1 * z, (h * x, z)


def with_leaves(w, carry, x):
    """Leaves that are not differentiated, and that the step uses."""
    h, count, key = carry
    key, own = jax.random.split(key)
    noise = 0.1 * jax.random.normal(own, h.shape)
    h = jnp.tanh(w @ h + x * count.astype(x.dtype) + noise)
    return (h, count + 1, key), h.sum()


def initial(step):
    return (H, jnp.zeros((), int), jax.random.key(0)) if step is with_leaves else H


def value(step, schedule, **settings):
    """A loss of the weights, the initial state and the inputs."""

    def loss(w, h, xs):
        start = initial(step)
        start = (h, *start[1:]) if isinstance(start, tuple) else h
        run = lambda carry, x: step(w, carry, x)
        scan = el.Scan(run, schedule=schedule, **settings)
        carry, ys = scan(start, xs)
        leaves = jax.tree.leaves((carry, ys))
        leaves = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)

    return loss


def compared(step, schedule, mode=lambda f: jax.grad(f, (0, 1, 2)), **settings):
    plainly = {k: v for k, v in settings.items() if k in ("reverse", "in_axes", "keep")}
    losses = value(step, schedule, **settings), value(step, el.StoreAll(), **plainly)
    found, expected = (jax.jit(mode(loss))(W, H, XS) for loss in losses)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


SCHEDULES = [
    # All in one batch; in several; with segments left over; one by one.
    Abreast(4, 2, size=8),
    Abreast(4, 5, size=10),
    Abreast(3, 2, size=3),
    Abreast(2, 4, size=8),
    Abreast(4, 3),
    # Within another level.
    Abreast(2, 3, size=6, outer=3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("step", [plain, slow(with_outputs), with_leaves])
def test_gradients(step, schedule):
    compared(step, schedule)


SETTINGS = {
    "reverse": dict(reverse=True),
    "unroll": dict(unroll=2),
    "policy": dict(policy=jax.checkpoint_policies.dots_saveable),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    compared(with_outputs, SCHEDULES[3], **SETTINGS[name])
    compared(plain, SCHEDULES[1], **SETTINGS[name])


MODES = {
    "hessian": lambda f: jax.hessian(lambda w, h, xs: f(w, h, xs), argnums=1),
    "forward over reverse": lambda f: lambda *a: jax.jvp(jax.grad(f), a, a)[1],
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, argnums=1), argnums=1),
    "a batch": lambda f: (
        lambda w, h, xs: jax.vmap(jax.grad(f, (0, 1)), in_axes=(None, 0, None))(
            w, jnp.stack([h, 2 * h]), xs
        )
    ),
}


@pytest.mark.parametrize("mode", slow_if("hessian".__eq__, MODES))
def test_modes(mode):
    compared(with_outputs, SCHEDULES[0], MODES[mode])


def test_any_axis_of_xs():
    def loss(schedule):
        def run(w, xs):
            step = lambda h, x: plain(w, h, x["a"] + x["b"][:4])
            scan = el.Scan(step, schedule=schedule, in_axes={"a": 0, "b": 1})
            return jnp.sum(scan(H, xs)[0])

        return jax.grad(run, (0, 1))

    xs = {"a": XS, "b": jnp.cos(jnp.arange(23 * 6.0)).reshape(6, 23)}
    found, expected = (loss(s)(W, xs) for s in (SCHEDULES[0], el.StoreAll()))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_slots_of_lower_precision():
    exact, rounded = (
        jax.grad(value(plain, schedule))(W, H, XS)
        for schedule in (SCHEDULES[0], el.Cast(SCHEDULES[0], jnp.bfloat16))
    )
    assert 0 < np.abs(exact - rounded).max() < 0.05


def test_a_loop_that_stops_runs_its_segments_one_by_one():
    def loss(schedule):
        def run(w, h, xs):
            near, step = lambda h: jnp.sum(h) < 100, lambda h, x: (w @ h + x**2, None)
            loop = el.ScanWhile(near, step, max_steps=23, schedule=schedule)
            h, _, steps = loop(h, xs)
            return jnp.sum(jnp.sin(h)), steps

        return jax.jit(jax.grad(run, (0, 1, 2), has_aux=True))(W, H, XS)

    (found, steps), (expected, _) = map(loss, (SCHEDULES[0], el.StoreAll()))
    assert steps == 23
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_error_of_a_debugger_says_which_steps_it_was():
    # The derivative of the root of zero is not finite.
    step = lambda h, x: (1 + 0.1 * jnp.sqrt(h * (x - 13) ** 2), None)
    loss = lambda h: el.Scan(step, schedule=SCHEDULES[0])(h, jnp.arange(23.0))[0]
    with pytest.raises(el.NonFiniteError, match="iterations 12 to 19 of Scan"):
        el.DebugNonFinite(jax.grad(loss))(jnp.ones(()))


# What it takes.


def shapes(schedule):
    """The shapes of the products within a gradient."""
    loss = value(plain, schedule)
    text = jax.jit(jax.grad(loss)).lower(W, H, XS).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    return {line.split("-> tensor<")[1].split("xf32")[0] for line in lines}


def test_one_product_serves_all_segments():
    # Of 23 steps, three are left over, and of five segments two.
    alone, abreast = shapes(Abreast(4, 1)), shapes(Abreast(4, 3))
    assert {"4x3", "4x2"} <= abreast - alone


@pytest.mark.parametrize("abreast", [4, slow(16)])
def test_what_segments_take_is_counted(abreast):
    args = recurrent(1024, 64)
    plan = el.Scan(args[0], schedule=Abreast(8, abreast, size=32)).plan(*args[1:])
    found = temp_bytes(gradient(plan.pinned), *args)
    one = el.Scan(args[0], schedule=Abreast(8, 1, size=8)).plan(*args[1:])
    alone = temp_bytes(gradient(one.pinned), *args)
    carries = 4 * 64 * (plan.layout.order.slots - one.layout.order.slots)
    # The carries of all segments are there at once, with their `xs`, the carry that
    # each has reached, and what is carried back past the batch.
    assert carries <= found - alone <= 8 * carries
