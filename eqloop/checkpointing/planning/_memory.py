"""How much memory a layout takes: what is stored, and the working set of the rest."""

import dataclasses
import functools
from typing import Any

import jax

from ..._formula import is_inexact
from ..._lists import pick, put
from ..engine._forward import Active, Saveable
from ..engine._layout import Layout, Nested, Revolved, Stored
from ..engine._levels import Nest
from ..engine._loop import Loop, stack_type
from ..engine._primitive import planned_loop
from ..engine._problem import Problem
from ..engine._step import Step
from ._compiled import temporary_bytes
from ._cost import StepCost, step_cost, xs_types


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, besides its inputs and outputs; or less.

    Buffers are aligned, and there are some of a few bytes, so that a little is added.
    """
    cost = step_cost(problem, active)
    total = stored_bytes(cost, layout) + working_set(problem, active, layout)
    return total + total // 200 + 512


def stored_bytes(cost: StepCost, layout: Layout) -> int:
    """The bytes of the slots and of the residuals of a block."""
    match layout:
        case Stored():
            return cost.everything
        case Revolved():
            blocks = [layout.block] + [layout.block - layout.missing] * (
                layout.missing > 0
            )
            # Each slot has a start and a rank, of four bytes each.
            slots = layout.primal_slots * 8
            if not _is_elsewhere(layout):
                slots += (layout.primal_slots + 1) * cost.carry
        case Nested():
            blocks = [nest.block for nest in layout.nests]
            slots = _nested_slots(cost, layout)
    # A block has its own cotangents of what all steps share, and its own part of `xs`
    # and of the cotangents of `ys`.
    per_step = cost.residuals + cost.x + cost.ct_x + cost.ct_y
    return slots + sum(cost.ct_consts + n * per_step for n in blocks if n > 1)


def _nested_slots(cost: StepCost, layout: Nested) -> int:
    # XLA does away with what is never read: where no step is run again but to be
    # reversed, that is what the reversal of a step does not need of its carry.
    last = cost.read if layout.block == 1 else cost.carry
    is_flat = all(len(nest.levels) == 1 for nest in layout.nests)
    inner = (
        sum(nest.levels[1:-1]) * cost.carry + nest.levels[-1] * last
        for nest in layout.nests
        if len(nest.levels) > 1
    )
    first = 0 if _is_elsewhere(layout) else layout.primal_slots + 1
    # Nests are reversed one after the other, in the same memory.
    return first * (last if is_flat else cost.carry) + max(inner, default=0)


def _is_elsewhere(layout: Nested | Revolved) -> bool:
    """Whether the slots are in another memory; that of a CPU is that of its host."""
    return layout.on_host and jax.default_backend() != "cpu"


def working_set(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that are allocated besides those that grow with the layout."""
    sample = _sample(layout)
    loop = _shorter(problem.loop, sample.length)
    small = _Sample(
        _text(problem.step),
        jax.default_backend(),
        loop,
        problem.policy,
        sample,
        active,
        dataclasses.replace(problem, loop=loop, planner=_Fixed(sample)),
    )
    measured = _measured(small)
    if not isinstance(layout, Nested):
        return measured
    # To compile every number of levels and nests would take long. Each adds little.
    depth = max(len(nest.levels) for nest in layout.nests)
    return measured + 512 * (max(depth - 2, 0) + len(layout.nests) - 1)


def _sample(layout: Layout) -> Layout:
    """A small layout that XLA makes the same kind of program of."""
    match layout:
        case Stored():
            return Stored(4)
        case Revolved():
            block = min(layout.block, 4)
            rest = min(layout.block - layout.missing, 2) if layout.missing else block
            small = Revolved(8 * block + rest, min(layout.slots, 3), block)
            return dataclasses.replace(small, on_host=layout.on_host)
        case Nested():
            depth = max(len(nest.levels) for nest in layout.nests)
            nest = Nest((3,) * min(depth, 2), min(layout.block, 3))
            return Nested((nest,), on_host=layout.on_host)


def _shorter(loop: Loop, length: int) -> Loop:
    """A short loop that keeps some of its outputs, all, or none as the loop does."""
    if loop.kept is None:
        return dataclasses.replace(loop, length=length)
    _, between, _ = loop.gaps
    kept = range(0, min(length, loop.rows), min(between, 1) + 1)
    return dataclasses.replace(loop, length=length, kept=kept)


@functools.lru_cache(maxsize=128)
def _text(step: Step) -> str:
    return str(step.jaxpr)


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Plans the one layout."""

    only: Layout

    def layout(self, problem: Problem, active: Active) -> Layout:
        return self.only


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A small loop. Steps that print alike are alike, as far as memory goes."""

    text: str
    backend: str
    loop: Loop
    policy: Saveable
    layout: Layout
    active: Active
    problem: Problem = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _measured(sample: _Sample) -> int:
    """What the compiled reverse sweep of a small loop takes beside its slots."""
    problem, active, layout = sample.problem, sample.active, sample.layout
    cost, total = step_cost(problem, active), _gradient_bytes(problem, active)
    if total is None:
        return 4 * cost.carry + 2 * cost.ct_consts + 3 * cost.residuals
    return max(total - stored_bytes(cost, layout), 0)


def _gradient_bytes(problem: Problem, active: Active) -> int | None:
    """The temporary memory of a loop's gradient, if it can be known."""
    step, loop = problem.step, problem.loop

    def gradient(inputs: Any, ct_ys: Any) -> Any:
        def run(*marked: Any) -> Any:
            merged = (put(*g) for g in zip(inputs, active, marked, strict=True))
            carry, ys = planned_loop(problem, *merged)
            return pick(carry, active.carry), list(filter(is_inexact, ys))

        (carry, _), pull = jax.vjp(run, *map(pick, inputs, active))
        # A loss depends on the last carry, and so do its cotangents.
        return pull(([-leaf for leaf in carry], ct_ys))

    inputs = (step.const_types, step.carry_types, xs_types(problem, loop.length))
    ct_ys = [stack_type(y, loop.rows) for y in step.y_types if is_inexact(y)]
    return temporary_bytes(gradient, inputs, ct_ys)
