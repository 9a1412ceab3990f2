"""Every schedule in every mode and context, against `jax.lax.scan`."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

import eqloop as el

from ..marks import slow_if
from . import derivatives
from .abreast import Abreast
from .derivatives import (
    CONTEXTS,
    MODES,
    inputs,
    looped,
    mapped,
    rematerialised,
)

SCHEDULES = (
    el.StoreAll(),
    el.Recursive(2),
    el.Chunked(3, batch=3),
    el.Binomial(3),
    el.Binomial(2, block=2),
    Abreast(2, 2, size=4),
)

name = lambda f: getattr(f, "__name__", str(f))


def scan(schedule: Any) -> Any:
    return lambda f, init, xs, **settings: el.Scan(f, schedule=schedule, **settings)(
        init, xs
    )


def evaluate(mode: Any, context: Any, loop: Any) -> list[np.ndarray]:
    run = jax.jit(functools.partial(mode, context(loop)))
    return jax.tree.map(np.asarray, jax.tree.leaves(run(*inputs())))


@functools.cache
def expected(mode: Any, context: Any) -> list[np.ndarray]:
    return evaluate(mode, context, jax.lax.scan)


def check(mode: Any, context: Any, schedule: Any) -> None:
    actual = evaluate(mode, context, scan(schedule))
    assert_close(actual, expected(mode, context))


def assert_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


# A mode that is like another one, under `vmap` or of a part of its arguments. The
# contexts below have gradients.
LIKE_OTHERS = (
    derivatives.primal,
    derivatives.grad,
    derivatives.grad_of_parameters,
    derivatives.jacfwd,
    derivatives.jacrev,
    derivatives.hessian,
    derivatives.vjp,
)


@pytest.mark.parametrize("mode", slow_if(LIKE_OTHERS.__contains__, MODES), ids=name)
def test_modes(mode):
    check(mode, derivatives.plain, el.Binomial(3))


# The test above has `Binomial(3)` in this mode, and contexts have `Recursive(2)`.
@pytest.mark.parametrize(
    "schedule",
    slow_if((el.Binomial(3), el.Recursive(2)).__contains__, SCHEDULES[1:]),
    ids=str,
)
def test_schedules(schedule):
    check(derivatives.forward_over_reverse, derivatives.plain, schedule)


# One of blocks; an order of which every step is reversed by itself has nothing more.
@pytest.mark.parametrize(
    "schedule",
    slow_if(lambda s: s != el.Binomial(2, block=2), SCHEDULES[1:]),
    ids=str,
)
def test_with_64_bits(schedule):
    mode = derivatives.forward_over_reverse
    with jax.enable_x64(True):
        loops = (scan(schedule), jax.lax.scan)
        assert_close(*(evaluate(mode, derivatives.plain, loop) for loop in loops))


@pytest.mark.parametrize("mode", [derivatives.jvp, derivatives.vjp], ids=name)
def test_without_jit(mode):
    actual = mode(derivatives.plain(scan(el.Binomial(3))), *inputs())
    same = expected(mode, derivatives.plain)
    for a, e in zip(jax.tree.leaves(actual), same, strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


# What these are like is tried in other contexts.
SLOW = (
    derivatives.unrolled,
    derivatives.vmap_of_vmap,
    derivatives.in_fori_loop,
    derivatives.in_checkpoint,
    derivatives.shard_map,
    derivatives.vmap_of_xs,
    derivatives.in_scan,
    derivatives.in_remat,
)


@pytest.mark.parametrize("context", slow_if(SLOW.__contains__, CONTEXTS[1:]), ids=name)
@pytest.mark.sampled
def test_contexts(context):
    # Modes and schedules take turns; all of them are tried by the slow test.
    turn = CONTEXTS.index(context)
    mode = (derivatives.grad, derivatives.forward_over_reverse)[turn % 2]
    check(mode, context, SCHEDULES[1 + turn // 2 % 5])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("context", CONTEXTS, ids=name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_modes_in_contexts(mode, context, schedule):
    check(mode, context, schedule)


PLACES = (mapped, looped, rematerialised)


@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.sampled
def test_places(place):
    mode = derivatives.jvp if place is rematerialised else derivatives.vjp
    check(place(mode), derivatives.plain, el.Binomial(3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.parametrize("context", [derivatives.plain, derivatives.vmap], ids=name)
def test_modes_in_places(context, place, mode, schedule):
    check(place(mode), context, schedule)
