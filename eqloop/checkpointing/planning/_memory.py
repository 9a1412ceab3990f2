"""How much memory a layout takes: its program is compiled, and never run."""

import dataclasses
import functools
from typing import Any

import jax

from ..._partition import pick, put
from ..._tangents import is_inexact
from ..engine._forward import Active, Saveable
from ..engine._layout import Layout
from ..engine._loop import Loop, stack_type
from ..engine._primitive import planned_loop
from ..engine._problem import LoopSpec, Problem
from ..engine._step import Step
from ._compiled import temporary_bytes
from ._cost import step_cost, xs_types
from ._guess import working_set


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, besides its inputs and outputs; or less.

    A loop is compiled alone, and within another program a few more of its values may
    be buffers, so that a little is added.
    """
    order, extra = layout.order.stand_in(len(problem.step.carry_types))
    stand_in = dataclasses.replace(layout, order=order)
    loop = _of_length(problem.loop, order.length)
    fixed = dataclasses.replace(problem, loop=loop, planner=_Fixed(stand_in))
    measured = _measured(
        _Program(
            _text(problem.step),
            (jax.default_backend(), jax.config.read("jax_enable_x64")),
            loop,
            problem.policy,
            stand_in,
            active,
            fixed,
        )
    )
    if measured is None:
        cost = step_cost(problem, active)
        measured, extra = layout.stored_bytes(cost) + working_set(cost), 0
    total = measured + extra
    return total + total // 200 + 512


def _of_length(loop: Loop, length: int) -> Loop:
    """The loop with another length that keeps as many of its outputs, if it can."""
    if length == loop.length:
        return loop
    if loop.kept is None:
        return dataclasses.replace(loop, length=length)
    _, between, _ = loop.gaps
    kept = range(0, length, between + 1)[: loop.rows]
    return dataclasses.replace(loop, length=length, kept=kept)


@functools.lru_cache(maxsize=128)
def _text(step: Step) -> str:
    return str(step.jaxpr)


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """Plans the one layout."""

    only: Layout

    def layout(self, loop: LoopSpec) -> Layout:
        return self.only


@dataclasses.dataclass(frozen=True)
class _Program:
    """A loop under a layout. Steps that print alike take the same memory."""

    text: str
    platform: tuple[str, bool]
    loop: Loop
    policy: Saveable
    layout: Layout
    active: Active
    problem: Problem = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _measured(program: _Program) -> int | None:
    """The temporary memory of a loop's gradient, if it can be known."""
    problem, active = program.problem, program.active
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
