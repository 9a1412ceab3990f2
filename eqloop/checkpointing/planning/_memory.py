"""How much memory a layout takes: its program is compiled, and never run."""

import dataclasses
import functools

import jax

from ..._compiled import temporary_bytes
from ..engine._forward import Active, Saveable
from ..engine._layout import Layout
from ..engine._loop import Loop
from ..engine._problem import Problem
from ..engine._step import Step
from ._cost import step_cost
from ._guess import working_set
from ._trial import Fixed, gradient_of, of_length


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, besides its inputs and outputs; or less.

    A loop is compiled alone, and within another program a few more of its values may
    be buffers, so that a little is added.
    """
    problem = problem.under(layout)
    order, extra = layout.order.stand_in(len(problem.step.carry_types))
    stand_in = dataclasses.replace(layout, order=order)
    loop = of_length(problem.loop, order.length)
    fixed = dataclasses.replace(problem, loop=loop, planner=Fixed(stand_in))
    measured = _measured(
        _MeasuredLoop(
            _printed(problem.step),
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


@functools.lru_cache(maxsize=128)
def _printed(step: Step) -> str:
    return str(step.jaxpr)


@dataclasses.dataclass(frozen=True)
class _MeasuredLoop:
    """A loop under a layout. Steps that print alike take the same memory."""

    text: str
    platform: tuple[str, bool]
    loop: Loop
    policy: Saveable
    layout: Layout
    active: Active
    problem: Problem = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=512)
def _measured(program: _MeasuredLoop) -> int | None:
    """The temporary memory of a loop's gradient, if it can be known."""
    run, types = gradient_of(program.problem, program.active)
    return temporary_bytes(run, *types)
