"""Every schedule in every mode and context, against `jax.lax.scan`."""

import jax
import pytest

import eqloop as el

from .. import derivatives
from ..asserts import assert_close
from ..derivatives import (
    CONTEXTS,
    MODES,
    assert_agrees,
    evaluate,
    inputs,
    looped,
    mapped,
    name,
    rematerialised,
    scan,
)
from ..marks import slow_if
from ..schedules import BLOCKS, EVERY_KIND, NESTED, SLOTS

SCHEDULES = EVERY_KIND

# Those that plan by cost, or store elsewhere.
PLANNED = (el.Budget("3KiB"), el.Budget("64KiB"), el.Offload(SLOTS))

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
    assert_agrees(mode, derivatives.plain, scan(SLOTS))


# The test above has `Binomial(3)` in this mode, and contexts have `Recursive(2)`.
@pytest.mark.parametrize(
    "schedule",
    slow_if((SLOTS, NESTED).__contains__, SCHEDULES[1:]),
    ids=str,
)
def test_schedules(schedule):
    assert_agrees(derivatives.forward_over_reverse, derivatives.plain, scan(schedule))


# One of blocks; an order of which every step is reversed by itself has nothing more.
@pytest.mark.parametrize(
    "schedule",
    slow_if(lambda s: s != BLOCKS, SCHEDULES[1:]),
    ids=str,
)
def test_with_64_bits(schedule):
    mode = derivatives.forward_over_reverse
    with jax.enable_x64(True):
        assert_agrees(mode, derivatives.plain, scan(schedule))


@pytest.mark.parametrize("mode", [derivatives.jvp, derivatives.vjp], ids=name)
def test_without_jit(mode):
    actual = mode(derivatives.plain(scan(SLOTS)), *inputs())
    expected = evaluate(mode, derivatives.plain, jax.lax.scan)
    assert_close(actual, expected, rtol=2e-4, atol=2e-5)


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
    assert_agrees(mode, context, scan(SCHEDULES[1 + turn // 2 % 6]))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("context", CONTEXTS, ids=name)
@pytest.mark.parametrize("mode", MODES, ids=name)
def test_modes_in_contexts(mode, context, schedule):
    assert_agrees(mode, context, scan(schedule))


PLACES = (mapped, looped, rematerialised)


@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.sampled
def test_places(place):
    mode = derivatives.jvp if place is rematerialised else derivatives.vjp
    assert_agrees(place(mode), derivatives.plain, scan(SLOTS))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.parametrize("place", PLACES, ids=name)
@pytest.mark.parametrize("context", [derivatives.plain, derivatives.vmap], ids=name)
def test_modes_in_places(context, place, mode, schedule):
    assert_agrees(place(mode), context, scan(schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", PLANNED, ids=str)
@pytest.mark.parametrize(
    ("mode", "context"),
    [
        (derivatives.hessian, derivatives.plain),
        (derivatives.reverse_over_reverse, derivatives.plain),
        (mapped(derivatives.grad), derivatives.plain),
        (derivatives.grad, derivatives.vmap),
        (derivatives.grad, derivatives.in_checkpoint),
        (derivatives.grad, derivatives.shard_map),
    ],
    ids=name,
)
def test_schedules_that_plan_or_store_elsewhere(mode, context, schedule):
    assert_agrees(mode, context, scan(schedule))
