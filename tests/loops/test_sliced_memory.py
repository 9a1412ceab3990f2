"""What XLA allocates for sliced scans: that which is kept, and nothing besides."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..checkpointing.steps import cell
from ..compiling import temp_bytes
from ..marks import slow

pytestmark = pytest.mark.sampled

WIDTH = 32
CARRY = 4 * WIDTH


def shapes(length: int) -> tuple[tuple[int, ...], ...]:
    return (WIDTH, WIDTH), (WIDTH,), (length, WIDTH)


def scan(schedule: Any = None, **kept: Any) -> Callable[..., Any]:
    def f(w: Any, h: Any, x: Any) -> Any:
        h = cell(w, h, x)
        return h, jnp.sin(h) * jnp.cos(h)

    def run(w: Any, h: Any, xs: Any) -> Any:
        step = lambda h, x: f(w, h, x)
        return el.SlicedScan(step, schedule=schedule, **kept)(h, xs)

    return run


def pulled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs and gradients, given the cotangents of what is kept."""

    def function(w: Any, h: Any, xs: Any, ct_ys: Any) -> Any:
        (carry, ys), pull = jax.vjp(run, w, h, xs)
        return ys, pull((2 * carry, ct_ys))

    return function


def gradient_bytes(schedule: Any, length: int, **kept: Any) -> int:
    rows = len(range(length)[slice(*map(kept.get, ("start", "stop", "step")))])
    return temp_bytes(pulled(scan(schedule, **kept)), *shapes(length), (rows, WIDTH))


@pytest.mark.parametrize(
    "kept",
    [{"step": 10}, {"start": 3, "step": 10}, {"step": -7}, {"stop": 9}, {"stop": 0}],
    ids=str,
)
def test_the_primal_takes_no_memory_besides_its_outputs(kept):
    # Neither for outputs that are skipped, nor for parts of `xs`.
    assert temp_bytes(scan(**kept), *shapes(1000)) < 12 * CARRY


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        (el.Recursive(8), {"start": 3, "step": 10}),
        slow(el.Recursive(8), {"step": -7}),
        slow(el.Binomial(16), {"start": 3, "step": 10}),
        (el.Binomial(16), {"step": -7}),
    ],
    ids=str,
)
def test_a_gradient_takes_its_slots_and_little_besides(schedule, kept):
    slots = scan_slots(schedule, 1000)
    assert gradient_bytes(schedule, 1000, **kept) < (slots + 24) * CARRY


def scan_slots(schedule: Any, length: int) -> int:
    run = el.Scan(lambda h, x: (h + x, None), schedule=schedule)
    return run.plan(0.0, jnp.zeros(length)).slots


def test_memory_does_not_grow_with_what_is_skipped():
    less = gradient_bytes(el.Binomial(8), 100, step=5)
    assert gradient_bytes(el.Binomial(8), 10_000, step=500) <= less + 2 * CARRY


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        slow(el.StoreAll(), {"step": 10}),
        slow(el.StoreAll(), {"start": 3, "step": -10}),
        (el.StoreAll(), {"start": -1}),
        (el.Recursive(8), {"step": 10}),
        (el.Binomial(10, block=20), {"start": 3, "step": -10}),
    ],
    ids=str,
)
def test_plans_count_what_is_kept(schedule, kept):
    planned = []

    def plan(w: Any, h: Any, xs: Any) -> None:
        f = lambda h, x: (h := cell(w, h, x), jnp.sin(h) * jnp.cos(h))
        planned.append(el.SlicedScan(f, schedule=schedule, **kept).plan(h, xs))

    jax.eval_shape(plan, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes(1000)))
    taken = gradient_bytes(schedule, 1000, **kept)
    assert taken <= planned[0].peak_bytes <= 1.1 * taken + 2 * CARRY


def test_a_budget_is_kept():
    budget = 8 * 1024
    schedule = el.Budget(budget, measure=False)
    assert gradient_bytes(schedule, 1000, step=9) <= budget
    # The outputs of all steps would not fit.
    assert budget < 1000 * CARRY / 10


@pytest.mark.slow
def test_the_frontier_is_that_of_the_sliced_loop():
    f = lambda h, x: (jnp.sin(h + x), jnp.tanh(jnp.sin(h)) * jnp.cos(h))
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(WIDTH,), (1000, WIDTH)]]
    some, every = (el.SlicedScan(f, step=step) for step in (100, None))
    plans = some.frontier(*types)
    assert plans.chosen == some.plan(*types)
    assert plans.chosen.peak_bytes < 0.8 * every.plan(*types).peak_bytes
