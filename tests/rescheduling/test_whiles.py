"""Reverse mode through while loops that have none, in whatever they may be."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..asserts import assert_close
from ..marks import slow


def by_jax(cond, body, init):
    return lax.while_loop(cond, body, init)


def by_eqloop(cond, body, init):
    return el.CheckpointedWhileLoop(cond, body, checkpoints=4, max_steps=256)(init)


def newton(loop, a):
    """The root of `x**3 + x = a`, by damped steps: each halves until it gets better."""
    residual = lambda x: x**3 + x - a

    def step(carry):
        x, count = carry
        by = residual(x) / (3 * x**2 + 1)
        worse = lambda s: jnp.abs(residual(x - s * by)) > jnp.abs(residual(x))
        halved = loop(worse, lambda s: s / 2, jnp.ones_like(a))
        return x - halved * by, count + 1

    far = lambda carry: (jnp.abs(residual(carry[0])) > 1e-9) & (carry[1] < 50)
    return loop(far, step, (jnp.full_like(a, 0.1), 0))[0]


def adaptive(loop, a):
    """A decay, by Heun's steps that are made shorter where their error is large."""
    slope = lambda y: -a * y**2

    def step(carry):
        t, y, dt = carry
        dt = jnp.minimum(dt, 1 - t)
        euler = y + dt * slope(y)
        heun = y + dt / 2 * (slope(y) + slope(euler))
        good = jnp.abs(heun - euler) < 1e-2
        t, y = jnp.where(good, t + dt, t), jnp.where(good, heun, y)
        return t, y, jnp.where(good, 1.5 * dt, dt / 2)

    init = jnp.zeros_like(a), jnp.ones_like(a), jnp.full_like(a, 0.5)
    return loop(lambda carry: carry[0] < 1 - 1e-9, step, init)[1]


def in_scan(one, loop, a):
    step = lambda h, w: (one(loop, a + jnp.sin(w * h)), h)
    h, hs = lax.scan(step, a, jnp.linspace(0.2, 1.0, 3))
    return h + jnp.sum(hs)


def in_cond_in_scan(one, loop, a):
    def step(h, flag):
        return lax.cond(flag, functools.partial(one, loop), jnp.sin, h + a), None

    return lax.scan(step, a, jnp.arange(4) % 2 == 0)[0]


def in_vmap(one, loop, a):
    return jnp.sum(jax.vmap(functools.partial(one, loop))(a * jnp.linspace(0.5, 2, 8)))


def in_scan_in_vmap(one, loop, a):
    each = functools.partial(in_scan, one, loop)
    return jnp.sum(jax.vmap(each)(a * jnp.linspace(0.5, 2, 8)))


def in_itself(one, loop, a):
    step = lambda carry: (one(loop, carry[0] + a), carry[1] + 1)
    return loop(lambda carry: carry[0] + carry[1] < 4.0, step, (a, 0.0))[0]


AROUND = {
    "alone": lambda one, loop, a: one(loop, a),
    "in jit": lambda one, loop, a: jax.jit(functools.partial(one, loop))(a),
    "in scan": in_scan,
    "in cond in scan": in_cond_in_scan,
    "in vmap of 8": in_vmap,
    "in scan in vmap of 8": in_scan_in_vmap,
    "in itself": in_itself,
}


@pytest.mark.sampled
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("one", [newton, adaptive])
def test_slopes_are_those_of_finite_differences(around, one):
    with jax.enable_x64(True):
        a, by = jnp.float64(1.3), 1e-6
        library = functools.partial(around, one, by_jax)
        f = el.Reschedule(library, el.Recursive(2), whiles=4)
        value, slope = jax.jit(jax.value_and_grad(f))(a)
        assert_close(value, library(a), 1e-12)
        run = jax.jit(library)
        assert_close(slope, (run(a + by) - run(a - by)) / (2 * by), 1e-6)
        pushed = jax.jvp(library, (a,), (jnp.ones_like(a),))[1]
        assert_close(slope, pushed, 1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("one", [newton, adaptive])
@pytest.mark.parametrize("whiles", [5, slow(el.Recursive(64))], ids=repr)
def test_slopes_are_those_of_the_loop_written_with_eqloop(one, whiles):
    with jax.enable_x64(True):
        a = jnp.linspace(0.5, 2, 8)
        sums = lambda run: jax.jit(jax.grad(lambda a: jnp.sum(jax.vmap(run)(a))))(a)
        f = el.Reschedule(functools.partial(in_scan, one, by_jax), whiles=whiles)
        assert_close(sums(f), sums(functools.partial(in_scan, one, by_eqloop)), 1e-10)


def test_examples_that_have_stopped_stay_as_they_are():
    """Others of the batch go on. Steps that converge would not tell."""
    grown = lambda loop, a: loop(lambda x: x < 10, lambda x: x * x + 1, a)
    library = functools.partial(in_vmap, grown, by_jax)
    f, a = el.Reschedule(library, whiles=4), jnp.float32(1.3)
    found = jax.jit(jax.value_and_grad(f))(a)
    assert_close(found, jax.jvp(library, (a,), (jnp.ones_like(a),)), 1e-5)


def test_second_derivatives():
    with jax.enable_x64(True):
        a = jnp.float64(1.3)
        f = el.Reschedule(root, whiles=3)
        curved = -0.25 * a**-1.5
        assert_close(jax.jvp(jax.grad(f), (a,), (a,))[1], a * curved, 1e-4)
        assert_close(jax.grad(jax.grad(f))(a), curved, 1e-4)


def test_bounds_that_are_known_only_to_the_program():
    def library(w, n):
        return lax.fori_loop(n - 3, n + 2, lambda i, h: jnp.sin(w * h), w)

    f = el.Reschedule(library, whiles=2)
    expected = jax.grad(lambda w: library(w, 4))(0.7)
    assert_close(jax.jit(jax.grad(f))(0.7, 4), expected)
    each = jax.vmap(jax.grad(f), (None, 0))(0.7, jnp.array([4, 4]))
    assert_close(each, jnp.stack([expected] * 2))


def test_no_step():
    f = el.Reschedule(
        lambda w, n: lax.while_loop(lambda h: h < n, lambda h: h + w, w), whiles=2
    )
    assert jax.grad(f)(0.7, -1.0) == 1


ONES = jnp.ones(2)


def root(a):
    far = lambda x: jnp.any(jnp.abs(x * x - a) > 1e-6)
    return lax.while_loop(far, lambda x: (x + a / x) / 2, 2 * a)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap])
def test_without_whiles_an_error_names_the_line(around):
    f = el.Reschedule(around(root))
    assert_close(f(ONES), around(root)(ONES))
    said = r"lax.while_loop at .*test_whiles.py:\d+ .*whiles="
    with pytest.raises(ValueError, match=said):
        jax.grad(lambda a: jnp.sum(f(a)))(ONES)
