"""Kernels in the form that TPUs take, interpreted, and compiled where `libtpu` is.

A number of 1,024 rows is a tile there, and the last block has rows too many.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop._compat import HAS_MOSAIC_GPU
from eqloop._programs import lowered
from eqloop.checkpointing.fused import _pallas

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
    use_settings,
)
from .fused_steps import numbers

pytestmark = pytest.mark.skipif(
    not HAS_MOSAIC_GPU, reason="of later versions, which have more operations"
)


@pytest.fixture
def reasons(monkeypatch):
    """Has kernels be of that form, and notes why others are not."""
    use_settings(monkeypatch, tiles=True)
    return reasons_noted(monkeypatch)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    [
        *("lorenz", "izhikevich", "branches", "newton"),
        *map(slow, ("neuron", "noisy", "pendulum", "bodies", "squid")),
    ],
)
def test_values_and_gradients_are_those_of_lax_scan(name, reasons):
    check(name, rows=6)
    assert set(reasons) == {""}


def test_so_are_those_of_several_blocks(reasons):
    check("lorenz", rows=1030, length=4)
    assert set(reasons) == {""}


@pytest.mark.slow
def test_every_mode_of_differentiation(reasons):
    alike(all_modes, W, H, XS)
    assert "" in reasons


def _flags(schedule, w, h, xs):
    """A step with flags in its carry, in its branches and its outputs."""

    def step(carry, x):
        h, n, was_far = carry
        is_far = jnp.where(was_far, h > 0.1, x > w[1])
        h = jax.lax.cond(w[0] > 0, jnp.sin, jnp.cos, w[0] * h) + x
        return (h, n + is_far.astype(n.dtype), is_far), (h * w[1], is_far)

    one = lambda h: el.Scan(step, schedule=schedule)((h, jnp.int32(0), h > 0), xs)
    (h, n, _), (ys, _) = jax.vmap(one)(h)
    return h, n.astype(h.dtype), ys


def test_flags_are_carried_and_rows_share_what_is_looped_over(reasons):
    alike(gradient(_flags), W, numbers(6), numbers(7))
    assert set(reasons) == {""}


def test_the_interpreter_of_tpus_agrees(monkeypatch, reasons):
    backend: Any = importlib.import_module("jax.experimental.pallas.tpu")
    monkeypatch.setattr(_pallas, "interpreter", backend.InterpretParams())
    alike(gradient(_flags), W, numbers(6), numbers(4))
    assert set(reasons) == {""}


@pytest.mark.parametrize(
    ("f", "dtype", "why"),
    [
        (lambda n: jnp.maximum(n, 3), "uint32", "it has no `max` of uint32"),
        (lambda n: jnp.where(n < 3, n, 3), "uint32", "it has no `min` of uint32"),
        (lambda n: n * 2, "float16", "it has no `convert_element_type` of float16"),
        (lambda n: n // 3, "int16", "it has no `div` of int16"),
        (lambda n: n // 3, "int32", ""),
    ],
)
def test_what_a_tpu_has_not_is_told(reasons, f, dtype, why):
    step = lambda n, _: (f(n).astype(dtype), None)
    run = lambda s, n: jax.vmap(lambda n: el.Scan(step, schedule=s)(n, length=3)[0])(n)
    alike(run, jnp.arange(6).astype(dtype))
    assert set(reasons) == {why}


# Compiled.

has_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the compiler of TPUs"
)


def _decay(rate, start, schedule, length=100):
    step = lambda h, _: (h - rate * jnp.sin(h), h)
    return el.Scan(step, schedule=schedule)(start, length=length)


def _loss(length):
    def loss(rate, starts):
        run = functools.partial(_decay, schedule=el.Fused(), length=length)
        h, ys = jax.vmap(run, (None, 0))(rate, starts)
        return jnp.mean(h**2) + jnp.mean(ys)

    return jax.grad(loss, (0, 1))


def _types(rows):
    return (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (rows,)))


@has_compiler
@pytest.mark.parametrize("kind", ["v5e", slow("v5p"), slow("v6e")])
def test_a_gradient_is_two_kernels_of_a_tpu(kind):
    args, f = list(_types(5000)), _loss(100)
    (loop,) = el.plans(f, device=kind)(*args)
    assert "by Mosaic, in tiles of 1,024 rows" in loop.plan.kernel
    with el.planning_for(kind):
        text = lowered(f, *args).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2


@has_compiler
@pytest.mark.filterwarnings("ignore:Fused")
def test_what_does_not_fit_or_stops_is_left_to_the_engine():
    (loop,) = el.plans(_loss(20_000), device="v5e")(*_types(5000))
    assert "MiB do not fit into a TPU's memory of vectors" in loop.plan.kernel
    (loop,) = el.plans(_loss(100), device="v5e")(*_types(100))
    assert loop.plan.kernel == "none: there are fewer than 128 rows"

    def settle(start):
        step = lambda h, _: (h * 0.9, None)
        stops = el.ScanWhile(lambda h: h > 1, step, max_steps=9, schedule=el.Fused())
        return stops(start)[0]

    f = jax.grad(lambda starts: jnp.sum(jax.vmap(settle)(starts)))
    (loop,) = el.plans(f, device="v5e")(*list(_types(5000))[1:])
    assert loop.plan.kernel == "none: rows stop at steps of their own"
