"""A step that compiles slowly is compiled once, and its budget is kept all the same."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing.planning import _compile_times, _paces

from ...asserts import assert_close
from ...compiling import programs_compiled, temp_bytes

LENGTH, SIZE = 127, 64
TYPES = (SIZE,), (LENGTH, SIZE)
NBYTES = 60 * 1024


def step_of(scale: float) -> Callable[..., Any]:
    """A step; another one for each number. All of them are taken to be large."""

    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.sin(scale * h) * jnp.cos(h) + x) + 1 / (2 + h**2)
        return h, h[0]

    return step


def gradient(step: Any, schedule: Any = None, **settings: Any) -> Callable[..., Any]:
    """The gradient in the initial carry and in `xs`."""

    def loss(init: Any, xs: Any) -> Any:
        carry, ys = el.Scan(step, schedule=schedule, **settings)(init, xs)
        return jnp.sum(carry**2) + jnp.sum(ys)

    return jax.grad(loss, (0, 1))


def counted(ask: Callable[..., Any]) -> tuple[int, Any]:
    """How many programs are compiled to ask about a call, and the answer."""
    before = programs_compiled()
    answer = ask(*(jax.ShapeDtypeStruct(shape, "float32") for shape in TYPES))
    return programs_compiled() - before, answer


def planned(f: Callable[..., Any]) -> tuple[int, el.Plan]:
    """How many programs the plan of the one loop in a function takes, and the plan."""
    count, plans = counted(el.plans(f))
    return count, plans[0].plan


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds that are long: any, at first. All steps are large."""
    monkeypatch.setattr(_compile_times, "_UNLIKELY_LONG", 0)
    monkeypatch.setattr(_compile_times, "_LIKELY_LONG", 0)
    monkeypatch.setattr(_paces, "_WORTH_TRYING", 0.0)
    decide = functools.partial(monkeypatch.setattr, _compile_times, "_LONG")
    decide(0.0)
    return decide


@pytest.mark.parametrize("measure", [True, False])
def test_a_plan_compiles_the_one_program_that_is_checked(measure: bool):
    step, schedule = step_of(1.0 + measure), el.Budget(NBYTES, measure=measure)
    count, plan = counted(el.Scan(step, schedule=schedule).plan)
    assert count == 1
    assert not plan.is_measured
    assert ("compiles slowly" in str(plan)) == measure
    # The gradient has this plan, and its program is the next one.
    ours = gradient(step, schedule)
    count, of_gradient = planned(ours)
    assert (count, of_gradient.pinned) == (0, plan.pinned)
    assert temp_bytes(ours, *TYPES) <= plan.peak_bytes <= NBYTES
    inputs = jnp.ones(SIZE), jnp.full((LENGTH, SIZE), 0.5)
    assert_close(jax.jit(ours)(*inputs), jax.jit(gradient(step))(*inputs))


def test_seconds_decide(long: Callable[[float], None]):
    long(1e9)
    step, schedule = step_of(3.0), el.Budget(NBYTES)
    count, plan = planned(gradient(step, schedule))
    assert count > 2
    assert plan.is_measured
    assert "slowly" not in str(plan)
    # It is known what the first program took, and nothing is compiled to find it out.
    long(0.0)
    count, plan = planned(gradient(step_of(3.0), schedule))
    assert count <= 1
    assert not plan.is_measured


def test_a_small_step_is_seen_to_compile_slowly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_compile_times, "_UNLIKELY_LONG", 4)
    schedule = el.Budget(NBYTES)
    count, plan = planned(gradient(step_of(4.0), schedule))
    # Steps alone, a gradient that stores everything, and the program that is checked.
    assert count == 3
    assert "slowly" in str(plan)
    assert planned(gradient(step_of(4.0), schedule)) == (0, plan)
    assert planned(gradient(step_of(4.0), el.Budget(NBYTES // 3)))[0] <= 2


@pytest.mark.sampled
@pytest.mark.parametrize("kilobytes", [1, 8, 16, 32])
def test_few_programs_are_compiled_for_any_budget(kilobytes: int):
    step, nbytes = step_of(5.0 + kilobytes), 1024 * kilobytes
    try:
        count, plan = planned(gradient(step, el.Budget(nbytes)))
    except ValueError as error:
        least = re.search(r"which is (\d+) bytes", str(error))
        assert least
        nbytes = int(least[1])
        count, plan = planned(gradient(step, el.Budget(nbytes)))
    assert count <= 3
    ours = gradient(step, el.Budget(nbytes))
    assert temp_bytes(ours, *TYPES) <= plan.peak_bytes <= nbytes
    # Steps that are left over would be another loop, there and back.
    assert len(plan.levels) <= 1


def by_jax(step: Any, schedule: Any) -> Callable[..., Any]:
    loss = lambda init, xs: jnp.sum(jax.lax.scan(step, init, xs)[0] ** 2)
    return jax.grad(el.Reschedule(loss, schedule), (0, 1))


def with_policy(step: Any, schedule: Any) -> Callable[..., Any]:
    named = lambda h, x: (el.name(step(h, x)[0], "h"), h[0])
    return gradient(named, schedule, policy="auto")


def stopping(step: Any, schedule: Any) -> Callable[..., Any]:
    def loss(init: Any, xs: Any) -> Any:
        scan = el.ScanWhile(
            lambda h: h[0] < 2, step, max_steps=LENGTH, schedule=schedule
        )
        return jnp.sum(scan(init, xs)[0] ** 2)

    return jax.grad(loss, (0, 1))


def with_a_while_loop(step: Any, schedule: Any) -> Callable[..., Any]:
    """Short loops of it would be compiled and not run."""
    halved = lambda h: jax.lax.while_loop(lambda h: h[0] > 1, lambda h: h / 2, h)
    return gradient(
        lambda h, x: step(h + jax.lax.stop_gradient(halved(h)), x), schedule
    )


KINDS = [by_jax, with_policy, stopping, with_a_while_loop]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_loops_of_every_kind(kind: Any):
    run = kind(step_of(50.0), el.Budget(NBYTES))
    count, plan = planned(run)
    assert count == 1
    assert not plan.is_measured
    assert temp_bytes(run, *TYPES) <= plan.peak_bytes <= NBYTES
    assert planned(run) == (0, plan)


def test_a_second_place():
    count, plan = planned(gradient(step_of(60.0), el.Budget(9000, host="1MiB")))
    assert count <= 3
    assert plan.bytes_elsewhere
    assert plan.peak_bytes - plan.bytes_elsewhere <= 9000


def test_processes_agree(monkeypatch: pytest.MonkeyPatch):
    """Each would take other times: what decides is how large the step is."""
    schedule = el.Budget(NBYTES)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    count, plan = planned(gradient(step_of(70.0), schedule))
    assert count == 1
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    # Nothing was noted.
    _, again = planned(gradient(step_of(70.0), schedule))
    assert again == plan


def test_another_process_makes_the_same_plan(tmp_path: Any):
    facts = tmp_path / "facts.json"
    run = gradient(step_of(80.0), el.Budget(NBYTES))
    el.measurements(facts)
    count, plan = planned(run)
    assert count == 1
    el.measurements(None)
    el.measurements(facts)
    again = gradient(step_of(80.0), el.Budget(NBYTES))
    jax.clear_caches()
    assert planned(again) == (0, plan)
    el.measurements(None)
