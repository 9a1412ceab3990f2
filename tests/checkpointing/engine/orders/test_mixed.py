"""Slots that hold carries or residuals, against `jax.lax.scan` and step by step."""

import dataclasses
import functools
import itertools
import pathlib
import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine.orders import _binomial
from eqloop.checkpointing.engine.orders._kept_steps import places_of, rows_of
from eqloop.checkpointing.engine.orders._mixed import Mixed
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.planning import _choice

from .... import derivatives
from ....benchmarks.mixed_storage import rows_of_table
from ....compiling import temp_bytes
from ....derivatives import MODES, inputs
from ....marks import slow_if
from ...memory import gradient
from ...steps import STEPS

pytestmark = pytest.mark.sampled


@dataclasses.dataclass(frozen=True)
class Shared(el.AbstractSchedule):
    """So many slots, some of which may hold the residuals of steps."""

    slots: int
    rows: int

    def layout(self, loop: el.LoopSpec) -> Layout:
        return Layout(Mixed(loop.length, self.slots, self.rows))


# The arithmetic.


class Walker:
    """Reverses a chain by hand; minds what is in the slots and how far it advances."""

    def __init__(self, order: Mixed):
        self.order, self.advances, self.kept = order, 0, 0
        self.reversed: list[int] = []
        segments = zip(order.starts, order.chain.segments, strict=True)
        for taken, (start, length) in reversed(list(enumerate(segments))):
            self.segment(start, length, taken + 1)

    def segment(self, start: int, length: int, used: int) -> None:
        """Some steps; the carry before them is in the last of the slots in use."""
        free = self.order.slots - used
        assert length > 0
        assert free >= 0
        far = self.order.chain.split_at(length, free + 1) if free else 0
        if far:
            assert 0 < far < length
            self.advances += far
            self.segment(start + far, length - far, used + 1)
            self.segment(start, far, used)
            return
        if free:
            assert (length - 1) * self.order.rows <= free
            self.kept += length - 1
        else:
            self.advances += sum(range(length))
        self.reversed += reversed(range(start, start + length))


@hypothesis.given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 7))
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_step_is_reversed_with_the_slots_that_there_are(length, slots, rows):
    order = Mixed(length, slots, rows)
    walker = Walker(order)
    assert walker.reversed == list(reversed(range(length)))
    assert (order.advances, order.chain.kept) == (walker.advances, walker.kept)
    assert len(order.starts) == order.slots == min(slots, length)


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_no_more_evaluations_than_with_carries_alone(rows):
    for length, slots in itertools.product((1, 2, 7, 40, 400), (1, 2, 5, 20, 60)):
        least = _binomial.sweep_advances(length, slots)
        # Where no residuals fit, the cut is that of a chain of carries but for a few.
        assert Mixed(length, slots, rows).advances <= least


@pytest.mark.parametrize(
    ("rows", "slots", "most"),
    [
        (1, 10, 3.51),
        (1, 20, 2.53),
        (2, 10, 3.78),
        (2, 20, 2.8),
        (2, 40, 2),
        (6, 20, 3.03),
    ],
)
def test_fewer_evaluations_than_blocks_in_the_same_memory(rows, slots, most):
    found = Mixed(400, slots, rows).evaluations / 400
    in_blocks = [
        Revolved(400, slots - block * rows, block).evaluations / 400
        for block in range(2, slots // rows)
        if slots > block * rows
    ]
    in_blocks.append(Revolved(400, slots).evaluations / 400)
    assert found <= most
    assert found < 0.95 * min(in_blocks)


@pytest.mark.slow
def test_the_table_of_the_documentation():
    page = pathlib.Path(__file__).parents[4] / "docs" / "how_it_works.md"
    assert "\n".join(rows_of_table()) in page.read_text(encoding="utf-8")


# The gradient.


FEW = {("gru", 12, 9), ("ode", 8, 3), ("ode", 1, 1)}
CASES = [
    (name, slots, rows)
    for name in STEPS
    for slots, rows in ((1, 1), (4, 1), (8, 3), (12, 9))
]


@pytest.mark.parametrize("case", slow_if(lambda case: case not in FEW, CASES), ids=str)
def test_gradients_of_many_steps(case):
    name, slots, rows = case
    f, init, xs = STEPS[name](23)
    run = lambda schedule: jax.jit(gradient(schedule))
    found = run(Shared(slots, rows))(f, init, xs)
    expected = run(el.StoreAll())(f, init, xs)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


def step(w: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    """Residuals are of the type of a leaf of the carry; another leaf is a counter."""
    h, count = carry
    u, shift = x
    by = jnp.where(shift, u, count.astype(u.dtype) * u)
    mixed = jnp.tanh(w[0] * h + w[1] * jnp.roll(h, 1) + by)
    return (mixed, count + 1), (h * u, count + 1)


def under(schedule: Any, **settings: Any) -> Any:
    scan = lambda f, init, xs: el.Scan(f, schedule=schedule, **settings)(init, xs)
    return functools.partial(derivatives.run, scan, step=step)


LIKE_OTHERS = (
    derivatives.primal,
    derivatives.jacfwd,
    derivatives.jacrev,
    derivatives.linearize,
    derivatives.vjp,
    derivatives.grad_of_parameters,
    derivatives.hessian,
    derivatives.reverse_over_forward,
    derivatives.grad,
)
name = lambda f: f.__name__


@pytest.mark.parametrize("mode", slow_if(LIKE_OTHERS.__contains__, MODES), ids=name)
def test_modes(mode):
    check(mode, reverse=False)


@pytest.mark.parametrize(
    "mode", slow_if(lambda mode: mode is not derivatives.grad, MODES), ids=name
)
def test_modes_of_a_loop_that_goes_backwards(mode):
    check(mode, reverse=True)


def check(mode: Any, **settings: Any) -> None:
    evaluate = lambda schedule: jax.jit(
        functools.partial(mode, under(schedule, **settings))
    )(*inputs())
    found, expected = evaluate(Shared(4, 2)), evaluate(el.StoreAll())
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-5)


def test_batches_of_loops_that_stop_by_themselves():
    def loss(schedule, w, h, xs):
        run = lambda h, x: (jnp.tanh(w * h + x), h)
        loop = el.ScanWhile(
            lambda h: h[0] > 0.3, run, max_steps=len(xs), schedule=schedule
        )
        last, ys, _ = loop(h, xs)
        return jnp.sum(last**2) + jnp.sum(jnp.sin(ys))

    w, h, xs = jnp.full(3, 0.8), jnp.arange(3.0) + 1, jnp.full((9, 3), 0.01)
    batch = jnp.stack([h, 0.3 * h, 9 * h])
    for one in (loss, lambda *a: jax.vmap(loss, (None, None, 0, None))(*a).sum()):
        at = h if one is loss else batch
        gradient = jax.jit(jax.grad(one, (1, 2, 3)), static_argnums=0)
        both = (gradient(s, w, at, xs) for s in (Shared(3, 1), el.StoreAll()))
        for a, e in zip(*both, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_a_few_outputs_other_slots_and_a_part_of_a_loop():
    f = lambda h, x: (jnp.sin(h) + x, h * x)
    init, xs = jnp.linspace(0, 1, 5), jnp.linspace(0, 1, 100).reshape(20, 5)

    @dataclasses.dataclass(frozen=True)
    class Halves(el.AbstractSchedule):
        def layout(self, loop: el.LoopSpec) -> Layout:
            return loop.cut([(12, Shared(4, 1)), (8, el.Binomial(3))])

    def loss(schedule, init, xs):
        last, ys = el.SlicedScan(f, step=3, schedule=schedule)(init, xs)
        return jnp.sum(last**2) + jnp.sum(ys**2)

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    expected = gradient(el.StoreAll(), init, xs)
    offloaded = el.Offload(Shared(5, 1))
    for schedule in (
        Shared(5, 1),
        Halves(),
        el.Cast(Shared(5, 1), jnp.float32),
        offloaded,
    ):
        found = gradient(schedule, init, xs)
        for a, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_steps_whose_residuals_are_stored_are_not_run_again():
    f, init, xs = STEPS["recurrent"](40)
    text = jax.jit(gradient(Shared(20, 5))).lower(f, init, xs).compile().as_text()
    # The primal runs the step, so does the way to two kinds of carries, and so do a
    # step of which residuals are kept, and one that is reversed at once.
    assert len(re.findall(r" tanh\(", text or "")) == 5 * 2


def test_residuals_take_no_more_memory_than_carries():
    f, init, xs = STEPS["field"](100)
    carries = temp_bytes(gradient(el.Binomial(20)), f, init, xs)
    # A loop that writes residuals has a carry of its own, and parts of the next one.
    a_few = 3 * sum(leaf.nbytes for leaf in init)
    assert temp_bytes(gradient(Shared(20, 1)), f, init, xs) <= carries + a_few


def test_places():
    field, number = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3), ()))
    places = places_of([field, number, field, field], [field, number, field])
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1)]
    assert rows_of(places or []) == 2
    assert places_of([field], [number]) is None


# The budget.


def test_budgets_find_it(monkeypatch):
    # Also where it promises only little.
    monkeypatch.setattr(_choice, "_PROMISING", 1.0)
    f, init, xs = STEPS["field"](400)
    plan = lambda size: el.Scan(f, schedule=el.Budget(size, measure=False)).plan(
        init, xs
    )
    chosen = plan(34 * 8192)
    assert chosen._cost.rows == 1
    assert isinstance(chosen._layout.order, Mixed)
    assert "stored residuals" in str(chosen)
    least = el.Scan(f, schedule=el.Binomial(chosen.slots)).plan(init, xs)
    assert chosen.evaluations < 0.9 * least.evaluations


def test_a_step_whose_residuals_have_other_types_has_none_in_slots():
    wide = lambda h, x: (h + jnp.mean(jnp.sin(jnp.outer(h, h)), 0) + x, None)
    looped = lambda h, x: (
        jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h) + x,
        None,
    )
    for step in (wide, looped):
        plan = el.Scan(step, schedule=el.Recursive()).plan(
            jnp.ones(4), jnp.ones((9, 4))
        )
        assert plan._cost.rows is None
