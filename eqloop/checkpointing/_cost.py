"""What one step of a loop costs, in bytes and in work."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .._lists import pick, put
from . import _engine
from ._engine import Active
from ._layout import Layout, Nested, Stored
from ._primitive import Problem


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step costs when the loop is differentiated.

    Attributes:
        carry: Bytes of a carry.
        residuals: Bytes that one step adds to the residuals of a block.
        invariant: Bytes of residuals that a block has whatever its length.
    """

    carry: int
    residuals: int
    invariant: int

    def peak_bytes(self, layout: Layout) -> int:
        """The bytes that are allocated at once, besides inputs and outputs."""
        block = self.invariant + layout.block * self.residuals
        return rows(layout) * self.carry + block


def rows(layout: Layout) -> int:
    """The carries that there is room for at once, scratch rows included."""
    if isinstance(layout, Stored):
        return 0
    if isinstance(layout, Nested):
        # The slots of inner levels come and go, one nest after the other.
        inner = (sum(nest.levels[1:]) for nest in layout.nests)
        return layout.primal_slots + 1 + max(inner, default=0)
    return layout.primal_slots + 1


@functools.lru_cache(maxsize=128)
def step_cost(problem: Problem, active: Active) -> StepCost:
    """What one step costs, by abstract evaluation."""
    one, two, three = (_residuals(problem, active, count) for count in (1, 2, 3))
    per_step = max(three - two, 0)
    return StepCost(
        carry=nbytes(problem.step.carry_types),
        residuals=per_step,
        invariant=max(one, two - 2 * per_step, 0),
    )


def nbytes(types: Sequence[Any]) -> int:
    """The bytes of arrays of these types; those of a key are of what it is made of."""
    return sum(int(np.prod(t.shape)) * _itemsize(t.dtype) for t in types)


def _itemsize(dtype: Any) -> int:
    return getattr(dtype, "itemsize", 0)


def _residuals(problem: Problem, active: Active, count: int) -> int:
    """Bytes of the residuals of a block, less those that are inputs of the loop."""
    step, loop = problem.step, problem.loop.part(count)
    xs = [
        jax.ShapeDtypeStruct((*t.shape[:axis], count, *t.shape[axis:]), t.dtype)
        for t, axis in zip(step.x_types, loop.x_axes, strict=True)
    ]
    inputs = (step.const_types, step.carry_types, xs)

    def pull(*inputs: Any) -> Any:
        def run(*marked: Any) -> Any:
            groups = [put(*group) for group in zip(inputs, active, marked, strict=True)]
            carry, ys = _engine.stored(step, loop, problem.policy, *groups)
            return pick(carry, active.carry), ys

        marked = [pick(*group) for group in zip(inputs, active, strict=True)]
        return jax.vjp(run, *marked)[1]

    residuals = jax.tree.leaves(jax.eval_shape(pull, *inputs))
    return nbytes(residuals) - nbytes([*step.const_types, *xs])
