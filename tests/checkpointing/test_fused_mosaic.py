"""Kernels in the form that Pallas's backend Mosaic GPU takes, interpreted.

Rows are slices of arrays there, and the last two blocks have rows in common. All of
this the usual interpreter of Pallas runs, too, and that of the backend what it adds.
"""

import functools
import importlib
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._compat import HAS_MOSAIC_GPU
from eqloop._programs import equations
from eqloop.checkpointing.fused import _pallas
from eqloop.checkpointing.fused._lowered import lowered
from eqloop.checkpointing.fused._mosaic import why_not, written

from ..asserts import assert_close, assert_same
from ..marks import slow
from .fused_loops import (
    XS,
    H,
    W,
    alike,
    all_modes,
    check,
    gradient,
    reasons_noted,
    scanned,
    use_settings,
)
from .fused_steps import numbers


@pytest.fixture(autouse=True)
def reasons(monkeypatch):
    """Has kernels be of that form, and notes why others are not."""
    use_settings(monkeypatch, mosaic=True)
    return reasons_noted(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        *("lorenz", "neuron", "izhikevich", "branches", "newton"),
        *map(slow, ("noisy", "pendulum", "bodies", "squid")),
    ],
)
def test_values_and_gradients_are_those_of_lax_scan(name, reasons):
    check(name, rows=6)
    assert set(reasons) == {""}


@pytest.mark.slow
def test_every_mode_of_differentiation(reasons):
    alike(all_modes, W, H, XS)
    assert "" in reasons


@pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="a backend of later versions")
@pytest.mark.parametrize("length", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_its_own_interpreter_agrees(monkeypatch, length):
    backend: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    monkeypatch.setattr(_pallas, "interpreter", backend.InterpretGPUParams())

    def run(schedule, w, h, xs):
        def step(carry, x):
            h, n, _ = carry
            is_far = h > 0.1
            h = lax.cond(w[0] > 0, jnp.sin, jnp.cos, w[0] * h) + x
            return (h, n + 1, is_far), (h * w[1], is_far)

        init = (h, jnp.int32(0), h > 0)
        return el.Scan(step, schedule=schedule)(init, xs)

    of = lambda s, *args: jax.vmap(functools.partial(run, s), (None, 0, 0))(*args)
    total = lambda s, *args: sum(
        jnp.sum(jnp.sin(leaf))
        for leaf in jax.tree.leaves(of(s, *args))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )

    def evaluate(s, *args):
        return of(s, *args), jax.grad(functools.partial(total, s), (0, 1, 2))(*args)

    alike(evaluate, W, numbers(6), numbers(6, length))


def test_what_is_not_of_that_form_is_left_to_triton(reasons):
    w, h, xs = numbers(3, 2), numbers(4, 2), numbers(3, 5)
    inner = lambda s: jax.vmap(functools.partial(scanned, s), (None, 0, None))
    run = lambda s, *args: jax.vmap(inner(s), (0, None, 0))(*args)
    alike(gradient(run), w, h, xs)
    assert all("some of the axes" in why for why in reasons)
    del reasons[:]
    turn = lambda s, h: jax.vmap(
        lambda h: el.Scan(lambda h, _: (h % 0.7 + 0.3, None), schedule=s)(h, length=3)
    )(h)[0]
    alike(turn, H)
    assert set(reasons) == {"it has no `rem`"}


def test_tables_are_read_by_choices(reasons):
    table = numbers(5, 3)

    def run(s, w, h, xs):
        def step(carry, x):
            h, k = carry
            return (jnp.sin(h + w[0] * x) + table[k], (k * 3 + 1) % 5), h[k % 3]

        scan = el.Scan(step, schedule=s)
        one = lambda h, k, x: scan((h, k), x)[1]
        return jax.vmap(one)(h, jnp.arange(5, dtype=jnp.int32), xs)

    alike(gradient(run), W, numbers(5, 3), XS)
    assert set(reasons) == {""}


def _own(f, *xs):
    """An operation by those that the backend has."""
    program = written(lowered(jax.make_jaxpr(f)(*xs)))
    assert why_not([program]) is None
    return jax.jit(jex.jaxpr_as_fun(program))(*xs)[0]


@pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="a logarithm less exact near 1")
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("log1p", -0.999, 99),
        ("expm1", -30, 88),
        ("tan", -6, 6),
        ("atan", -50, 50),
        ("asin", -1, 1),
        ("acos", -1, 1),
        ("sinh", -88, 88),
        ("cosh", -88, 88),
        ("asinh", -1e5, 1e5),
        ("acosh", 1, 1e5),
        ("atanh", -0.999, 0.999),
        ("cbrt", -1e6, 1e6),
        ("floor", -1e9, 1e9),
        ("ceil", -1e9, 1e9),
    ],
)
def test_operations_that_it_lacks_are_exact_to_some_units_in_the_last_place(
    name, low, high
):
    random, f = np.random.default_rng(0), getattr(lax, name)
    near = np.sign(random.normal(size=500)) * 10.0 ** random.uniform(-8, 0, 500)
    x = np.concatenate([random.uniform(low, high, 3000), near])
    x = np.clip(x, low, high).astype(np.float32)
    names = {"atan": "arctan", "asin": "arcsin", "acos": "arccos"}
    names |= {"asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh"}
    exact: Any = getattr(np, names.get(name) or name)
    expected = exact(x.astype(np.float64))
    unit = np.spacing(np.abs(expected).astype(np.float32))
    assert np.max(np.abs(np.asarray(_own(f, x)) - expected) / unit) < 4
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2, -2], np.float32)
    assert_close(_own(f, odd), f(odd), rtol=1e-6, atol=0)


def test_so_are_powers_and_angles_and_what_is_counted():
    x = jnp.array([0.5, 2.0, 3.7, 0.0, jnp.inf])
    for y in (-1.5, 0.5, 2.5, -2.0, 3.0):
        assert_close(_own(lambda x, y=y: x**y, x), x**y, rtol=1e-6)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.0], np.float32)
    y, x = (a.reshape(-1) for a in np.meshgrid(odd, odd))
    assert_close(_own(lax.atan2, y, x), lax.atan2(y, x), rtol=1e-6)
    n = np.array([0, 1, -1, 2**31 - 1, -(2**31), 77], np.int32)
    assert_same(_own(lax.population_count, n), lax.population_count(n))
    assert_same(_own(lax.bitwise_not, n), lax.bitwise_not(n))
    flags = _own(lambda n: n.astype(bool), n)
    assert_same(_own(lambda x: x.astype("int8"), flags), (n != 0).astype(np.int8))


def test_an_accuracy_that_is_asked_for_is_no_part_of_a_kernel():
    x = jnp.array([0.1, 0.7, 3.0])
    slope = jax.vmap(jax.grad(lambda x: lax.cos(x, accuracy=lax.AccuracyMode.HIGHEST)))
    for f in (slope, jax.vmap(jax.grad(lax.erf))):
        program = written(lowered(jax.make_jaxpr(f)(x)))
        asked = [eqn.params.get("accuracy") for eqn in equations(program)]
        assert set(asked) == {None}
        assert_close(jax.jit(jex.jaxpr_as_fun(program))(x)[0], f(x), rtol=1e-6)


def test_what_it_has_not_is_said():
    of = lambda f, *xs: why_not([written(lowered(jax.make_jaxpr(f)(*xs)))]) or ""
    x, n = jnp.ones(3), jnp.ones(3, jnp.int8)
    assert of(lambda x, y: x**y, x, x) == "it has no `pow`"
    assert of(lambda n: n + n, n) == "it has no `add` of 8 bits"
    at = lambda x, i: x[i]
    assert "one of 300 numbers" in of(at, jnp.ones(300), jnp.int32(3))
    assert of(at, x, jnp.int32(1)) == ""
    with jax.enable_x64(True):
        assert of(jnp.sin, np.ones(3)) == "it has no `sin` of 64 bits"


def test_a_kernel_has_no_operation_that_it_lacks():
    f = lambda x: jnp.log1p(jnp.floor(x)) + jax.nn.sigmoid(jnp.arctan(x)) ** 3
    program = written(lowered(jax.make_jaxpr(f)(jnp.ones(3))))
    names = {eqn.primitive.name for eqn in equations(program)}
    assert not names & {"log1p", "floor", "atan", "logistic"}
