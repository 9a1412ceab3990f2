"""A while loop under an order for loops of which the length is not known."""

import dataclasses

from ..._formula import Formula, Selected
from ..._partition import Arrays, split
from ..._typecheck import PyTree
from ..._types import Aval, BatchAxis, Value
from ..._vmapped import mapped
from ...progress import told_back, told_while
from ..engine._held import Saves
from ..engine._primitive import PlannedLoop
from ..engine._problem import Problem
from ..engine._repetition import Counted
from ..engine._slim import Way
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ._batch import joint_loop, stops_apart
from ._early_ends import with_early_ends
from ._stopping import AbstractStopping
from ._until import run_plain


@dataclasses.dataclass(frozen=True)
class UntilStopped(AbstractStopping):
    """Another step is run if the first leaf of the carry says so.

    There are neither `xs` nor `ys`, and an `AbstractWhileOrder` is the layout. Under
    `vmap` each example stops at its own time.
    """

    def run(
        self, problem: Problem, saves: Saves | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]]:
        (consts, init, _), loop = inputs, problem.loop
        step = with_early_ends(problem.step)

        def forward(init: Arrays) -> tuple[list[Value], list[Value]]:
            if saves is None:
                return run_plain(step, loop.length, consts, init), []
            return saves.layout.forward(step, saves.held, consts, init)

        carry, saved = told_while(forward, loop.meter, consts, init)
        return carry, [], saved

    def saved_types(self, step: Step, saves: Saves) -> list[Aval]:
        return saves.layout.saved_types(step.carry_types, saves.held)

    def reverse(self, way: Way, inputs: PyTree, saved: Arrays) -> Cotangents:
        (consts, _, carried, _), layout = inputs, way.layout
        settings = (way.loop, self.back(way), layout.reversal)
        step = with_early_ends(way.step)
        sweep = Sweep(step, *settings, consts, [], [], count=saved[0])
        run = lambda sweep, carried: layout.reverse(sweep, saved, carried)
        return told_back(run, sweep, carried, saved)

    def batched(
        self, formula: PlannedLoop, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        given, dims, saves = dims, tuple(map(tuple, dims)), formula.saves
        is_apart = stops_apart(formula.problem, axis_data, dims)
        if saves is not None and is_apart:
            self.check_batched(formula, axis_data)
            return mapped(formula, axis_data, args, given)
        if not is_apart:
            formula, args, out_dims = Counted().batched(
                formula, axis_data, args, dims, self.lead
            )
            # All examples run as many steps, and store the same ones.
            count = saves.needs.total if saves else 0
            shown, slots = split(out_dims, len(out_dims) - count)
            integers = len(saves.layout.integers) if saves else 0
            return formula, args, [*shown, *[None] * integers, *slots]
        problem, consts, init = joint_loop(formula.problem, axis_data, args, dims)
        repetition = dataclasses.replace(self, is_joint=True)
        problem = dataclasses.replace(problem, repetition=repetition)
        args = (list(consts), list(init), [])
        joint = formula.remade(problem, args)
        is_of_example = (False, *[True] * (len(joint.out_avals_flat) - 1))
        selected = Selected.of(joint, is_of_example)
        return selected, args, [0] * len(selected.out_avals_flat)
