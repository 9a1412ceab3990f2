"""What is found out about a step is found out once, for all steps that are alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import eqloop as el
from eqloop.checkpointing import trace_step
from eqloop.checkpointing._schedules import Pinned
from eqloop.checkpointing.engine import _backward_step, _leaves
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning import _facts

from ...compiling import programs_compiled

LEAVES = 4
WEIGHTS = [jnp.full(8, 1.0 + i) for i in range(LEAVES)]
CARRY, XS = [jnp.zeros(8)] * LEAVES, jnp.ones((256, 8))


def plan(
    scale: float,
    budget: str = "64KiB",
    size: int = 8,
    length: int = 256,
    **settings: Any,
) -> el.Plan:
    """The plan for a step with many leaves, which is a new function each time."""

    def step(h: Any, x: Any) -> Any:
        h = [
            jnp.tanh(scale * a * w[:size] + x) for a, w in zip(h, WEIGHTS, strict=True)
        ]
        return h, sum(map(jnp.sum, h))

    scan = el.Scan(step, schedule=el.Budget(budget), **settings)
    return scan.plan([leaf[:size] for leaf in CARRY], XS[:length, :size])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of steps that are differentiated: how many steps each has."""
    blocks: list[int] = []
    differentiate = _backward_step._differentiated

    def counting(back: Any, block: Any = None, *args: Any, **settings: Any) -> Any:
        # With its outputs it is the step of the way there as well.
        if not settings:
            blocks.append(1 if block is None else block.length)
        return differentiate(back, block, *args, **settings)

    monkeypatch.setattr(_backward_step, "_differentiated", counting)
    return blocks


def test_steps_that_differ_in_a_derivative_rule_have_plans_of_their_own():
    """Their programs print the same. One rule saves a number of a step, one a row."""

    def planned(rule: Any) -> el.Plan:
        @jax.custom_jvp
        def f(h: Any) -> Any:
            return jnp.sin(h)

        f.defjvp(lambda primals, dots: (jnp.sin(*primals), rule(*primals, *dots)))
        scan = el.Scan(lambda h, _: (f(h), None), schedule=el.StoreAll())
        return scan.plan(jnp.zeros(64), None, length=100)

    rules = [lambda h, dot: dot, lambda h, dot: jnp.cos(h) * dot]
    straight, curved = map(planned, rules)
    assert straight._cost.residuals < curved._cost.residuals
    assert planned(rules[0]) == straight


def test_a_new_function_that_does_the_same_is_planned_at_once(counted: list[int]):
    first = plan(1.25)
    assert counted
    counted.clear()
    compiled = programs_compiled()
    assert plan(1.25) == first
    assert (programs_compiled(), counted) == (compiled, [])


def test_another_function_is_not_taken_for_it(counted: list[int]):
    plan(1.25)
    for other in (dict(scale=1.5), dict(scale=1.25, size=4)):
        counted.clear()
        plan(**other)
        assert counted
    counted.clear()
    plan(1.25, policy=el.policies.save_dots)
    assert counted


def holding(value: float) -> Any:
    """A step that calls a function which holds a matrix."""
    held = np.zeros((33, 33), np.float32)
    held[16, 16] = value
    f = jax.jit(lambda h: h @ held)
    return lambda h, x: (jnp.tanh(f(h) + x), None)


def checkpointed(name: str) -> Any:
    """A step that is checkpointed by a policy, which is a function."""
    keeps = jax.checkpoint_policies.save_only_these_names(name)
    f = lambda h: jnp.sin(checkpoint_name(jnp.sin(h), "a"))
    return lambda h, x: (jax.checkpoint(f, policy=keeps)(h) + x, None)


@pytest.mark.parametrize(
    ("step", "one", "other"),
    [
        (holding, 0.5, 0.5 + 1e-6),
        (holding, 0.0, -0.0),
        (checkpointed, "a", "b"),
    ],
)
def test_a_step_that_prints_the_same_is_not_taken_for_it(
    step: Any, one: Any, other: Any, counted: list[int]
):
    plan_of = lambda value: el.Scan(step(value), schedule=el.Budget("64KiB")).plan(
        jnp.zeros(33), jnp.zeros((256, 33))
    )
    before = set(_facts._known)
    plan_of(one)
    of_one = set(_facts._known) - before
    assert counted
    assert of_one
    counted.clear()
    plan_of(one)
    assert (counted, set(_facts._known) - before) == ([], of_one)
    # All is found out anew: in the process, and for a file of measurements.
    plan_of(other)
    assert counted
    assert set(_facts._known) - before > of_one


def test_a_step_is_differentiated_once(counted: list[int]):
    compiled = programs_compiled()
    plan(1.75)
    # What it costs is known from the program of its reversal. The others are the blocks
    # of the loops that are compiled.
    assert counted.count(1) == 1
    assert len(counted) <= 1 + programs_compiled() - compiled
    plan(1.75, budget="32KiB")
    plan(1.75, length=128)
    assert counted.count(1) == 1


SCHEDULES = (
    el.Recursive(4),
    el.Recursive(4, batch=4),
    el.Binomial(4),
    el.Budget("8KiB", measure=False),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_gradient_differentiates_a_single_step_once(
    counted: list[int], schedule: Any
):
    w = jnp.eye(8)
    step = lambda h, x: (jnp.tanh(w @ h + x), None)
    loss = lambda h: jnp.sum(el.Scan(step, schedule=schedule)(h, XS)[0])
    jax.jit(jax.grad(loss)).lower(jnp.ones(8))
    assert counted.count(1) == 1


def test_a_gradient_differentiates_batches_of_one_size_once(
    monkeypatch: pytest.MonkeyPatch,
):
    """Though they are in the program twice: of steps run again, and of stored ones."""
    batches = list[int]()
    differentiate = _backward_step._differentiated

    def counting(back: Any, block: Any = None, is_batch: bool = False) -> Any:
        if is_batch:
            batches.append(block.length)
        return differentiate(back, block, is_batch)

    monkeypatch.setattr(_backward_step, "_differentiated", counting)
    order = Nested((Nest((12, 16)), Nest((64,))))
    schedule = Pinned(Layout(order, reversal=Together(16)))
    w = jnp.eye(8)
    step = lambda h, x: (jnp.tanh(w @ h + x), None)
    loss = lambda h: jnp.sum(el.Scan(step, schedule=schedule)(h, XS)[0])
    jax.jit(jax.grad(loss)).lower(jnp.ones(8))
    assert batches == [16]


def test_a_step_is_traced_once(monkeypatch: pytest.MonkeyPatch):
    """What it closes over becomes an input of the program that was traced."""
    traced = list[Any]()
    make = jax.make_jaxpr

    def counting(f: Any, *args: Any, **settings: Any) -> Any:
        traced.append(f)
        return make(f, *args, **settings)

    monkeypatch.setattr(jax, "make_jaxpr", counting)
    h, scale = jnp.ones(3), jnp.full(3, 2.0)
    types = [jax.typeof(h)], []
    step, consts = trace_step(lambda c, x: ([scale * c[0]], [1.0]), *types)
    assert len(traced) == 1
    assert [const is scale for const in consts] == [True]
    assert not any(aval.weak_type for aval in step.jaxpr.out_avals)
    carry, y = step(consts, [h], [])
    assert (carry[0] == 2).all()
    assert y[0] == 1


def test_no_block_is_traced_where_slots_hold_all_leaves(
    monkeypatch: pytest.MonkeyPatch,
):
    blocks = list[int]()
    ask = _leaves.leaves_read

    def asking(back: Any, loop: Any, block: int = 1) -> Any:
        blocks.append(block)
        return ask(back, loop, block)

    monkeypatch.setattr(_leaves, "leaves_read", asking)

    def trace(step: Any) -> None:
        scan = el.Scan(step, schedule=el.Binomial(4, block=8))
        loss = lambda h: jnp.sum(jnp.stack(scan(h, XS)[0]))
        jax.make_jaxpr(jax.grad(loss))(CARRY[:2])

    trace(lambda h, x: ([jnp.sin(leaf + x) for leaf in h], None))
    assert blocks == [1]
    trace(lambda h, x: ([jnp.sin(h[0] + x), h[1] + h[0]], None))
    assert blocks == [1, 1, 2]


def test_what_is_far_beyond_a_budget_is_not_compiled():
    compiled = programs_compiled()
    plan(2.25, budget="16KiB")
    # What seemed to fit, and what does.
    assert programs_compiled() <= compiled + 2


def test_a_budget_is_not_searched_for_again_where_the_smallest_plan_is_far_too_large():
    """Not even for the plan that a gradient with respect to all inputs would have."""

    def refused(scale: float, argnums: int | tuple[int, ...]) -> int:
        def loss(w: Any, h: Any, xs: Any) -> Any:
            step = lambda h, x: (jnp.tanh(scale * w @ jnp.tanh(w @ h) + x), None)
            return jnp.sum(el.Scan(step, schedule=el.Budget(1500))(h, xs)[0])

        types = jnp.ones((64, 64)), jnp.ones(64), jnp.ones((512, 64))
        compiled = programs_compiled()
        with pytest.raises(ValueError, match="does not fit"):
            el.plans(jax.grad(loss, argnums))(*types)
        return programs_compiled() - compiled

    of_all = refused(2.5, (0, 1, 2))
    assert refused(1.5, 0) <= of_all + 1
