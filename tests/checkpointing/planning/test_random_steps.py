"""Plans against what XLA allocates, for random steps: never too low, seldom too high."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing._plan import plan_of
from eqloop.checkpointing._schedule import AbstractSchedule

from ...marks import slow_if
from ..memory import temp_bytes
from .random_steps import Case, fixed_schedule, random_case

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float64, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Recorded(AbstractSchedule):
    """A schedule that tells which plans it made, those of batches as well."""

    schedule: Any
    plans: list = dataclasses.field(compare=False)

    def layout(self, problem: Any, active: Any) -> Any:
        layout = self.schedule.layout(problem, active)
        plan = plan_of(problem, active, layout)
        self.plans.append(plan)
        return layout


def measured(case: Case, schedule: Any) -> tuple[int, Any]:
    """What XLA allocates for a gradient, and the plan of the loop."""
    plans: list[Any] = []
    recorded = Recorded(schedule, plans)
    moving = lambda tree: [x for x in jax.tree.leaves(tree) if _is_inexact(x)]
    leaves, tree = jax.tree.flatten((case.f, case.init, case.xs))
    is_moving = [_is_inexact(leaf) for leaf in leaves]

    def run(marked: Any, others: Any) -> Any:
        marked, others = iter(marked), iter(others)
        merged = [next(marked if flag else others) for flag in is_moving]
        f, init, xs = tree.unflatten(merged)
        return case.run(f, init, xs, recorded)

    def loss(marked: Any, others: Any, cts: Any) -> Any:
        carry, ys = run(marked, others)
        return sum(jnp.sum(c * c).astype(jnp.float32) for c in moving(carry)) + sum(
            jnp.sum(y * ct).astype(jnp.float32)
            for y, ct in zip(moving(ys), cts, strict=True)
        )

    marked = [leaf for leaf, flag in zip(leaves, is_moving, strict=True) if flag]
    others = [leaf for leaf, flag in zip(leaves, is_moving, strict=True) if not flag]
    cts = moving(jax.eval_shape(run, marked, others)[1])
    taken = temp_bytes(jax.grad(loss), marked, others, cts)
    return taken, plans[-1]


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
