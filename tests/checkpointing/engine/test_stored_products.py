"""Products that the primal stores, so that steps are run again without them."""

import dataclasses
import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import eqloop as el
from eqloop.checkpointing.engine.orders._levels import Nest

from ...compiling import temp_bytes
from ...marks import slow, slow_if
from .reversals.products import (
    HS,
    MODES,
    STEPS,
    XS,
    W,
    accumulated,
    assert_as_scan,
    assert_equal,
    gradient,
    network,
    of_loop,
    read_twice,
    two_in_one,
)
from .storing import Storing

pytestmark = pytest.mark.sampled


# In segments of one batch and of two, by blocks, and for some of the steps.
LEVELS = Storing((Nest((3, 4)), Nest((1,))), with_products=2, size=4)
BATCHES = Storing()
BLOCKS = Storing((Nest((1,)), Nest((3,), 4)), with_products=1, size=4)
LAST = Storing((Nest((1,)), Nest((2, 3)), Nest((2, 3))), with_products=1, size=3)
FLAT = Storing((Nest((13,)),), with_products=1, size=4)


@pytest.mark.parametrize("schedule", [LEVELS, BATCHES, BLOCKS, LAST, FLAT], ids=str)
def test_schedules(schedule):
    assert_as_scan(two_in_one, schedule=schedule)


@pytest.mark.slow
def test_every_kind_of_step():
    for step in STEPS:
        assert_as_scan(step, schedule=LAST)


@pytest.mark.parametrize("mode", slow_if("a batch".__ne__, list(MODES)[1:]))
def test_modes(mode):
    assert_as_scan(network, mode, LAST)
    assert_as_scan(two_in_one, mode, LEVELS)


@pytest.mark.parametrize(
    "around", [slow(el.Offload), lambda within: el.Cast(within, jnp.float32)]
)
def test_slots_of_other_kinds(around):
    assert_as_scan(accumulated, schedule=around(LAST))


def test_carries_in_files(tmp_path):
    assert_as_scan(two_in_one, schedule=el.Spill(LAST, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "settings",
    [
        dict(reverse=True),
        slow(dict(unroll=2)),
        slow(dict(policy=jax.checkpoint_policies.dots_saveable)),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(settings):
    assert_as_scan(two_in_one, schedule=LAST, **settings)


def test_a_bar_in_the_loop(capsys):
    assert_as_scan(two_in_one, schedule=LAST, progress=True)
    assert "13/13" in capsys.readouterr().err


def dots(run: object, *args: object) -> int:
    return jax.jit(run).lower(*args).compile().as_text().count(" dot(")


@pytest.mark.parametrize(
    ("step", "nest", "least"),
    [
        (read_twice, Nest((3, 4)), 1 + 2),
        (read_twice, Nest((3,), 4), 1 + 2),
        (two_in_one, Nest((3, 4)), 2 + 4),
    ],
)
def test_products_are_computed_by_the_primal_alone(step, nest, least):
    schedule = Storing((nest,), with_products=1, size=4)
    assert dots(gradient(of_loop(step, schedule)), W, HS, XS[:12]) == least


def test_several_batches_do_not_wait_with_their_products():
    """Those of a batch are computed where it is linearised, once more."""
    schedule = Storing((Nest((3, 4)),), with_products=0, size=2)
    run = gradient(of_loop(read_twice, schedule))
    assert dots(run, W, HS, XS[:12]) == 1 + 1 + 1 + 2


@dataclasses.dataclass(frozen=True)
class Halved(el.AbstractSchedule):
    """Two segments, each of which another schedule plans."""

    within: el.AbstractSchedule

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        half = loop.length // 2
        return loop.cut([(half, self.within), (loop.length - half, self.within)])


def test_no_products_are_stored_of_segments():
    """The primal would have to store those of the last steps of each."""
    nests = (Nest((2, 3)),)
    plans = [
        el.Scan(functools.partial(two_in_one, W), schedule=Halved(within)).plan(
            HS, XS[:12]
        )
        for within in (Storing(nests, 1, 3), Storing(nests, 0, 3))
    ]
    assert plans[0].pinned == plans[1].pinned
    assert plans[0]._layout.steps_with_products == 0


def test_where_outputs_are_left_out():
    step = functools.partial(two_in_one, W)

    def sliced(h):
        h, ys = el.SlicedScan(step, step=3, schedule=LAST)(h, XS)
        return jnp.sum(h) + jnp.sum(ys)

    def plain(h):
        h, ys = jax.lax.scan(step, h, XS)
        return jnp.sum(h) + jnp.sum(ys[::3])

    assert_equal(*(jax.jit(jax.grad(run))(HS) for run in (sliced, plain)))


def test_steps_with_branches():
    """Their products are not stored, and nothing is wrong."""

    def branching(w, h, x):
        return jax.lax.cond(jnp.sum(h) > 0, lambda: jnp.tanh(w @ h), lambda: w @ x), h

    assert_as_scan(branching, schedule=LAST)


def test_a_loop_that_may_stop():
    """Nobody knows which of its steps will be the last."""

    def run(loop, **settings):
        def last(h):
            step = lambda h, x: (jnp.tanh(W @ h + x), None)
            return jnp.sum(loop(step, **settings)(h, XS)[0])

        return jax.jit(jax.grad(last))(HS)

    found = run(
        functools.partial(el.ScanWhile, lambda h: jnp.sum(h) < 1e3),
        max_steps=13,
        schedule=LAST,
    )
    assert_equal(found, run(el.Scan, schedule=el.StoreAll()))


WIDTH, LENGTH = 512, 200
CELL = jnp.sin(jnp.arange(WIDTH * WIDTH * 1.0)).reshape(WIDTH, WIDTH) / WIDTH**0.5
INIT, INPUTS = jnp.ones(WIDTH), jnp.sin(jnp.arange(LENGTH * WIDTH * 1.0))
INPUTS = INPUTS.reshape(LENGTH, WIDTH)


def cell(w, h, x):
    """One product as large as the carry; XLA stores three times as much of a step."""
    # The result of `tanh` is no leaf of the carry: then no products would be needed.
    return 0.5 * (h + jnp.tanh(w @ h + x)), None


def of_cell(schedule):
    def run(w, h, xs):
        step = functools.partial(cell, w)
        if schedule is None:
            return jnp.sum(jax.lax.scan(step, h, xs)[0])
        return jnp.sum(el.Scan(step, schedule=schedule)(h, xs)[0])

    return run


def plan_of_cell(budget):
    return el.Scan(functools.partial(cell, CELL), schedule=budget).plan(INIT, INPUTS)


# The products of all steps.
ALL = Storing((Nest((LENGTH,)),), with_products=1, size=25)
# Those of half of the steps.
HALF = Storing((Nest((4, 25)), Nest((4, 25))), with_products=1, size=25)


@pytest.mark.parametrize(("schedule", "count"), [(ALL, LENGTH), (HALF, LENGTH // 2)])
def test_a_plan_says_what_is_stored_and_how_much_that_takes(schedule, count):
    plan = plan_of_cell(schedule)
    assert plan._layout.steps_with_products == count
    assert f"stored products    of {count} steps, 2 KiB each" in str(plan)
    taken = temp_bytes(gradient(of_cell(schedule)), CELL, INIT, INPUTS)
    assert taken <= plan.peak_bytes < 1.15 * taken


def test_the_list_of_plans_has_the_plan_that_the_loop_itself_has():
    """The rows of products are leaves of the carry of the program, not of the loop."""
    (found,) = el.plans(gradient(of_cell(HALF)))(CELL, INIT, INPUTS)
    asked = plan_of_cell(HALF)
    assert found.plan.pinned == asked.pinned
    assert found.plan._cost == asked._cost
    assert found.plan.peak_bytes == asked.peak_bytes
    assert found.plan.holds == asked.holds


def test_a_plan_with_products_is_the_scan():
    args = CELL, INIT, INPUTS
    assert_equal(*(jax.jit(gradient(of_cell(one)))(*args) for one in (ALL, None)))


@pytest.mark.slow
@hypothesis.given(st.data())
def test_random_nests(data):
    nests, left = list[Nest](), 13
    while left:
        levels = data.draw(st.lists(st.integers(1, left), min_size=1, max_size=2))
        hypothesis.assume(math.prod(levels) <= left)
        nests.append(Nest(tuple(levels)))
        left -= nests[-1].length
    given = data.draw(st.integers(1, len(nests)))
    size = data.draw(st.integers(1, 5))
    step = data.draw(st.sampled_from(STEPS))
    assert_as_scan(step, schedule=Storing(tuple(nests), given, size))
