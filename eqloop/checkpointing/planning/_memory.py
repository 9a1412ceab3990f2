"""How much memory a layout takes: its program is compiled, and never run."""

import dataclasses
import functools
from typing import Any

import jax

from ..._lists import pick, put
from ..._tangents import is_inexact
from ..engine._forward import Active, Saveable
from ..engine._layout import Layout, Nested
from ..engine._levels import Nest
from ..engine._loop import Loop, stack_type
from ..engine._primitive import planned_loop
from ..engine._problem import Problem
from ..engine._step import Step
from ._compiled import temporary_bytes
from ._cost import step_cost, xs_types
from ._stored import stored_bytes, working_set


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, besides its inputs and outputs; or less.

    A loop is compiled alone, and within another program a few more of its values may
    be buffers, so that a little is added.
    """
    stand_in, extra = _stand_in(layout, len(problem.step.carry_types))
    loop = _of_length(problem.loop, stand_in.length)
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
        measured, extra = stored_bytes(cost, layout) + working_set(cost), 0
    total = measured + extra
    return total + total // 200 + 512


# Levels that are compiled as they are. Each makes the program longer.
_DEEPEST = 4


def _stand_in(layout: Layout, leaves: int) -> tuple[Layout, int]:
    """A layout that takes as much memory, of which the program is small.

    Args:
        layout: The layout.
        leaves: How many leaves the carry has.

    Returns:
        The layout, and the bytes that the given one takes besides.
    """
    if not isinstance(layout, Nested):
        return layout, 0
    nests = tuple(_shallow(nest) for nest in layout.nests)
    deeper = sum(
        len(nest.levels) - len(small.levels)
        for nest, small in zip(layout.nests, nests, strict=True)
    )
    # Each level has counters of its own, and a few values that move between loops:
    # with 50 leaves up to 9 kB were seen, with two leaves 1 kB.
    return dataclasses.replace(layout, nests=nests), deeper * (1024 + 176 * leaves)


def _shallow(nest: Nest) -> Nest:
    """Fewer levels with as many slots: those between hold the same leaves."""
    if len(nest.levels) <= _DEEPEST:
        return nest
    first, *between, last = nest.levels
    kept = _DEEPEST - 3
    return Nest((first, *between[:kept], sum(between[kept:]), last), nest.block)


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

    def layout(self, problem: Problem, active: Active) -> Layout:
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
