"""The gradient of a loop as a program by itself, to be compiled or run."""

import dataclasses
from typing import Any

import jax

from ..._partition import pick, put
from ..._tangents import is_inexact
from ..._typecheck import PyTree
from ..._types import Aval, Value
from ..engine._forward import Active
from ..engine._loop import Loop, stack_type
from ..engine._primitive import planned_loop
from ..engine._problem import LoopSpec, Problem
from ._cost import xs_types


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Plans the one layout."""

    only: Any  # Layout | AbstractWhileOrder

    def layout(self, loop: LoopSpec) -> Any:
        return self.only


def gradient_of(problem: Problem, active: Active) -> Any:
    """The cotangents of the inputs of a loop, as a program.

    Returns:
        A function of the inputs, in threes, and the cotangents of `ys`; and the types
        of these arguments.
    """
    step, loop = problem.step, problem.loop

    def gradient(inputs: PyTree, ct_ys: Value) -> PyTree:
        def run(*marked: PyTree) -> PyTree:
            merged = (put(*g) for g in zip(inputs, active, marked, strict=True))
            carry, ys = planned_loop(problem, *merged)
            return pick(carry, active.carry), list(filter(is_inexact, ys))

        (carry, _), pull = jax.vjp(run, *map(pick, inputs, active))
        # A loss depends on the last carry, and so do its cotangents.
        return pull(([-leaf for leaf in carry], ct_ys))

    ct_ys = [stack_type(y, loop.rows) for y in step.y_types if is_inexact(y)]
    return gradient, (input_types(problem), ct_ys)


def input_types(problem: Problem) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of what a loop is given: consts, the initial carry, and `xs`."""
    step, loop = problem.step, problem.loop
    return step.const_types, step.carry_types, xs_types(problem, loop.length)


def of_length(loop: Loop, length: int) -> Loop:
    """The loop with another length that keeps as many of its outputs, if it can."""
    if length == loop.length:
        return loop
    if loop.kept is None:
        return dataclasses.replace(loop, length=length)
    _, between, _ = loop.gaps
    kept = range(0, length, between + 1)[: loop.rows]
    return dataclasses.replace(loop, length=length, kept=kept)
