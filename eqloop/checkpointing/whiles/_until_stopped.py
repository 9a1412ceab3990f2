"""A while loop under an order for loops of which the length is not known."""

import dataclasses
from typing import Any

from jax import lax

from ..._formula import Formula, Selected
from ..._loop_markers import is_watched
from ..._partition import Arrays
from ..._typecheck import PyTree
from ..._types import Aval, BatchAxis, Value
from ..._vmapped import mapped
from ...progress import told_back, told_while
from ..engine._held import Saves
from ..engine._primitive import PlannedLoop
from ..engine._problem import Problem
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ._batch import joint_loop, stops_apart
from ._stopping import AbstractStopping
from ._while_order import UNLIMITED, first_state, next_carry, run_until


@dataclasses.dataclass(frozen=True)
class UntilStopped(AbstractStopping):
    """Another step is run if the first leaf of the carry says so.

    There are neither `xs` nor `ys`, and an `AbstractWhileOrder` is the layout. Under
    `vmap` each example stops at its own time.
    """

    def run(
        self, problem: Problem, saves: Saves | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]]:
        (consts, init, _), step, loop = inputs, problem.step, problem.loop

        def forward(init: Arrays) -> tuple[list[Value], list[Value]]:
            if saves is None:
                return _run_plain(step, loop.length, consts, init), []
            return saves.layout.forward(step, saves.held, consts, init)

        carry, saved = told_while(forward, loop.meter, consts, init)
        return carry, [], saved

    def saved_types(self, step: Step, saves: Saves) -> list[Aval]:
        return saves.layout.saved_types(step.carry_types, saves.held)

    def reverse(
        self, sweep: Sweep, layout: Any, saved: Arrays, carried: Arrays
    ) -> Cotangents:
        back = self.written_out_loops(sweep.back)
        sweep = dataclasses.replace(sweep, back=back, count=saved[0])
        run = lambda sweep, carried: layout.reverse(sweep, saved, carried)
        return told_back(run, sweep, carried, saved)

    def batched(
        self, formula: PlannedLoop, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        given, dims = dims, tuple(map(tuple, dims))
        if not stops_apart(formula.problem, axis_data, dims):
            return super().batched(formula, axis_data, args, dims)
        if formula.saves is not None:
            self.check_batched(formula, axis_data)
            return mapped(formula, axis_data, args, given)
        problem, consts, init = joint_loop(formula.problem, axis_data, args, dims)
        repetition = dataclasses.replace(self, is_joint=True)
        problem = dataclasses.replace(problem, repetition=repetition)
        args = (list(consts), list(init), [])
        joint = PlannedLoop(problem, None, args)
        is_of_example = (False, *[True] * (len(joint.out_avals_flat) - 1))
        selected = Selected.of(joint, is_of_example)
        return selected, args, [0] * len(selected.out_avals_flat)


def _run_plain(step: Step, max_steps: int, consts: Arrays, init: Arrays) -> list[Value]:
    """Runs the loop and saves nothing. Returns the final carry."""
    if max_steps == UNLIMITED and not is_watched():
        again = lambda carry: carry[0]
        return lax.while_loop(again, next_carry(step, consts), list(init))
    return run_until(step, consts, first_state(init), max_steps)[1]
