"""What is found out about a step is found out once, for all steps that are alike."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing.engine import _held
from eqloop.checkpointing.planning import _cost

from ...compiling import programs_compiled

LEAVES = 4
WEIGHTS = [jnp.full(8, 1.0 + i) for i in range(LEAVES)]
CARRY, XS = [jnp.zeros(8)] * LEAVES, jnp.ones((256, 8))


def plan(
    scale: float, budget: str = "64KiB", size: int = 8, **settings: Any
) -> el.Plan:
    """The plan for a step with many leaves, which is a new function each time."""

    def step(h: Any, x: Any) -> Any:
        h = [
            jnp.tanh(scale * a * w[:size] + x) for a, w in zip(h, WEIGHTS, strict=True)
        ]
        return h, sum(map(jnp.sum, h))

    scan = el.Scan(step, schedule=el.Budget(budget), **settings)
    return scan.plan([leaf[:size] for leaf in CARRY], XS[:, :size])


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The blocks of steps that are traced to see what they cost."""
    traced: list[Any] = []
    differentiate = _cost._Block._vjp

    def counting(block: Any, inputs: Any) -> Any:
        traced.append(block)
        return differentiate(block, inputs)

    monkeypatch.setattr(_cost._Block, "_vjp", counting)
    return traced


def test_a_new_function_that_does_the_same_is_planned_at_once(counted: list[Any]):
    first = plan(1.25)
    assert counted
    counted.clear()
    compiled = programs_compiled()
    assert plan(1.25) == first
    assert (programs_compiled(), counted) == (compiled, [])


def test_another_function_is_not_taken_for_it(counted: list[Any]):
    plan(1.25)
    for other in (dict(scale=1.5), dict(scale=1.25, size=4)):
        counted.clear()
        plan(**other)
        assert counted
    counted.clear()
    plan(1.25, policy=el.policies.save_dots)
    assert counted


def test_a_step_is_differentiated_once_for_its_residuals(counted: list[Any]):
    plan(1.75)
    # In a long loop. What the reversal of one step costs is known from its program.
    (long,) = (block.loop.length for block in counted)
    assert long > len(XS)


def test_no_block_is_traced_where_slots_hold_all_leaves(
    monkeypatch: pytest.MonkeyPatch,
):
    blocks = list[int]()
    ask = _held.leaves_read

    def asking(back: Any, loop: Any, block: int = 1) -> Any:
        blocks.append(block)
        return ask(back, loop, block)

    monkeypatch.setattr(_held, "leaves_read", asking)

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
    assert programs_compiled() == compiled + 1
