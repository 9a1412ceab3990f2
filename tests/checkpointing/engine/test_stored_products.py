"""Products that the primal stores, so that steps are run again without them."""

import dataclasses
import functools
from collections.abc import Iterator

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import eqloop as el
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._together import Together

from ...marks import slow, slow_if
from ..memory import temp_bytes
from .reversals.test_known_products import (
    HS,
    LEVELS,
    MODES,
    STEPS,
    XS,
    W,
    assert_equal,
    compared,
    gradient,
    network,
    of_loop,
    read_twice,
    two_in_one,
)


@dataclasses.dataclass(frozen=True)
class Storing(el.AbstractSchedule):
    """Another schedule, whose primal stores products."""

    within: el.AbstractSchedule = LEVELS

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return dataclasses.replace(self.within.layout(loop), keeps_products=True)


@dataclasses.dataclass(frozen=True)
class Segments(el.AbstractSchedule):
    """Two levels, and several batches within a segment."""

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        rest = Nest((loop.length % 6,)) if loop.length % 6 else None
        nests = [Nest((loop.length // 6, 6)), *filter(None, [rest])]
        return el.Layout(Nested(tuple(nests)), reversal=Together(3))


def test_every_kind_of_step():
    for step in STEPS:
        compared(step, schedule=Storing(Segments()))


@pytest.mark.parametrize("mode", slow_if("a batch".__ne__, list(MODES)[1:]))
def test_modes(mode):
    compared(network, mode, Storing(Segments()))
    compared(two_in_one, mode, Storing())


@pytest.mark.parametrize(
    "schedule",
    [
        el.Binomial(3, block=3),
        slow(el.Chunked(4, block=5)),
        slow(el.Chunked(13)),
        slow(el.Recursive(2)),
        slow(el.Offload(LEVELS)),
        slow(el.Cast(LEVELS, jnp.float32)),
        slow(el.StoreAll()),
    ],
    ids=str,
)
def test_schedules(schedule):
    compared(two_in_one, schedule=Storing(schedule))


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
    compared(two_in_one, schedule=Storing(Segments()), **settings)


def test_what_is_spilled(tmp_path):
    compared(two_in_one, schedule=Storing(el.Spill(LEVELS, tmp_path)))
    assert not list(tmp_path.iterdir())


def dots(run: object, *args: object) -> int:
    return jax.jit(run).lower(*args).compile().as_text().count(" dot(")


@pytest.mark.parametrize(("step", "least"), [(read_twice, 1 + 2), (two_in_one, 2 + 4)])
def test_products_are_computed_by_the_primal_alone(step, least):
    assert dots(gradient(of_loop(step, Storing())), W, HS, XS[:12]) == least


def test_where_outputs_are_left_out():
    """Their rows would have the products, so none are stored."""
    step = functools.partial(two_in_one, W)

    def sliced(h):
        h, ys = el.SlicedScan(step, step=3, schedule=Storing())(h, XS)
        return jnp.sum(h) + jnp.sum(ys)

    def plain(h):
        h, ys = jax.lax.scan(step, h, XS)
        return jnp.sum(h) + jnp.sum(ys[::3])

    assert_equal(*(jax.jit(jax.grad(run))(HS) for run in (sliced, plain)))
    plan = el.SlicedScan(step, step=3, schedule=Storing()).plan(HS, XS)
    assert plan.cost.stored_products == 0


def test_steps_with_branches_and_inverses():
    """Their products are not stored, and nothing is wrong."""

    def branching(w, h, x):
        return jax.lax.cond(jnp.sum(h) > 0, lambda: jnp.tanh(w @ h), lambda: w @ x), h

    compared(branching, schedule=Storing())
    step = lambda h, x: (h + 0.1 * (W @ x), None)
    inverse = lambda h, x: h - 0.1 * (W @ x)

    def run(schedule):
        return lambda x: jnp.sum(el.Scan(step, schedule=schedule)(HS, x)[0] ** 2)

    schedule = Storing(el.Reversible(inverse))
    runs = run(schedule), run(el.StoreAll())
    assert_equal(*(jax.jit(jax.grad(run))(XS) for run in runs))


WIDTH, LENGTH = 256, 200
CELL = jnp.sin(jnp.arange(WIDTH * WIDTH * 1.0)).reshape(WIDTH, WIDTH) / WIDTH**0.5
INIT, INPUTS = jnp.ones(WIDTH), jnp.sin(jnp.arange(LENGTH * WIDTH * 1.0))
INPUTS = INPUTS.reshape(LENGTH, WIDTH)


def cell(w, h, x):
    """One product as large as the carry; XLA stores three times as much of a step."""
    return jnp.tanh(w @ h + x), None


def of_cell(schedule):
    def run(w, h, xs):
        step = functools.partial(cell, w)
        if schedule is None:
            return jnp.sum(jax.lax.scan(step, h, xs)[0])
        return jnp.sum(el.Scan(step, schedule=schedule)(h, xs)[0])

    return run


def plan_of_cell(budget):
    return el.Scan(functools.partial(cell, CELL), schedule=budget).plan(INIT, INPUTS)


def budgets() -> Iterator[el.Budget]:
    """About what a loop takes whose residuals are all stored."""
    most = plan_of_cell(el.StoreAll()).peak_bytes
    for part in (0.6, 0.9, 1.3):
        yield el.Budget(int(part * most), measure=False)


def test_a_budget_has_products_stored_and_holds():
    found = []
    for budget in budgets():
        plan = plan_of_cell(budget)
        taken = temp_bytes(gradient(of_cell(budget)), CELL, INIT, INPUTS)
        assert taken <= plan.peak_bytes <= budget.nbytes
        if plan.layout.keeps_products:
            found.append(plan)
            # All that is foreseen is really there.
            assert plan.peak_bytes < 1.15 * taken
    assert found
    assert "stored products    1 KiB a step" in str(found[-1])
    pinned = found[-1].pinned
    args = CELL, INIT, INPUTS
    assert_equal(*(jax.jit(gradient(of_cell(one)))(*args) for one in (pinned, None)))


def test_a_measured_plan_may_have_them():
    frontier = el.frontier(el.Scan(functools.partial(cell, CELL)), INIT, INPUTS)
    kept = [plan for plan in frontier if plan.layout.keeps_products]
    assert all(plan.cost.stored_products == 4 * WIDTH for plan in kept)


@pytest.mark.slow
@hypothesis.given(st.data())
def test_random_layouts(data):
    outer, inner = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    size = data.draw(st.integers(1, inner))
    left = 13 - outer * inner
    hypothesis.assume(left >= 0)
    nests = [Nest((outer, inner)), *([Nest((left,))] if left else [])]
    layout = el.Layout(
        Nested(tuple(nests)), reversal=Together(size), keeps_products=True
    )
    step = data.draw(st.sampled_from(STEPS))
    compared(step, schedule=Fixed(layout))


@dataclasses.dataclass(frozen=True)
class Fixed(el.AbstractSchedule):
    only: el.Layout

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return self.only
