"""A loop goes on for as long as the first leaf of its carry says so.

It is closed under derivatives just as a loop of known length is. The loop of the step's
jvp stops when the primal does, since tangents are no part of what the condition reads.
"""

import dataclasses
from typing import Any, ClassVar, NoReturn

from ..._array_types import axes_of
from ..._formula import Formula, Selected, mapped
from ..._partition import Arrays, pick, split
from ..._reaching import names_axis
from ...progress import told_back, told_while
from ..engine._forward import Active
from ..engine._held import Saves, Way
from ..engine._primitive import PlannedLoop
from ..engine._problem import Problem
from ..engine._repetition import AbstractRepetition, Counted
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ._batch import joint_loop, stops_apart
from ._until import run_plain, unconditional


@dataclasses.dataclass(frozen=True)
class UntilStopped(AbstractRepetition):
    """Another step is run if the first leaf of the carry says so.

    There are neither `xs` nor `ys`, and an `AbstractWhileOrder` is the layout. Under
    `vmap` each example stops at its own time.
    """

    instead_of_effects: ClassVar[str] = (
        "Run so many steps with `el.Scan` and `schedule=el.StoreAll()`"
    )
    lead: ClassVar[int] = 1

    def run(
        self, problem: Problem, saves: Saves | None, inputs: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        (consts, init, _), step, loop = inputs, problem.step, problem.loop

        def forward(init: Arrays) -> tuple[list[Any], list[Any]]:
            if saves is None:
                return run_plain(step, loop.length, consts, init), []
            return saves.layout.forward(step, saves.held, consts, init)

        carry, saved = told_while(forward, loop.meter, consts, init)
        return carry, [], saved

    def saved_types(self, step: Step, saves: Saves) -> list[Any]:
        return saves.layout.saved_types(step.carry_types, saves.held)

    def reverse(self, way: Way, inputs: Any, saved: Arrays) -> Cotangents:
        (consts, _, carried, _), layout = inputs, way.layout
        settings = (way.loop, way.back, layout.reversal)
        sweep = Sweep(way.step, *settings, consts, [], [], count=saved[0])
        run = lambda sweep, carried: layout.reverse(sweep, saved, carried)
        return told_back(run, sweep, carried, saved)

    def reversed_step(self, step: Step) -> Step:
        return unconditional(step)

    def check(self, problem: Problem, active: Active, inputs: Any) -> None:
        consts = pick(problem.step.const_types, active.consts)
        check_consts(axes_of(inputs[1][0]), consts)

    def check_batched(self, formula: Formula, axis_data: Any) -> None:
        refuse_collectives(formula, axis_data)

    def batched(
        self, formula: PlannedLoop, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
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
            count = sum(saves.held) if saves else 0
            shown, slots = split(out_dims, len(out_dims) - count)
            integers = len(saves.layout.integers) if saves else 0
            return formula, args, [*shown, *[None] * integers, *slots]
        problem, consts, init = joint_loop(formula.problem, axis_data, args, dims)
        args = (list(consts), list(init), [])
        joint = formula.remade(problem, args)
        is_of_example = (False, *[True] * (len(joint.out_avals_flat) - 1))
        selected = Selected.of(joint, is_of_example)
        return selected, args, [0] * len(selected.out_avals_flat)

    def written_out(
        self, problem: Problem, back: Any, step: Step, inputs: Any, ends: Any
    ) -> NoReturn:
        refuse_written_out()


def refuse_collectives(formula: Formula, axis_data: Any) -> None:
    """Checks that examples can be reversed each by itself.

    Raises:
        ValueError: If they depend on each other.
    """
    if any(names_axis(jaxpr, axis_data.name) for jaxpr in formula.jaxprs):
        raise ValueError(
            f"`jax.vmap` over the gradient of a while loop with collectives over "
            f"{axis_data.name!r} in it: each example is reversed from its own "
            f"last step, and so the steps that collectives are to join do not "
            f"meet. Take the gradient of the batch instead, `jax.grad` of a sum "
            f"over the `jax.vmap`, or run the steps with `el.Scan`."
        )


def refuse_written_out() -> NoReturn:
    """Says what of a loop that stops cannot be had.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "A while loop cannot be differentiated twice in reverse mode if there is a "
        "`jax.custom_vjp` in its body whose backward rule is not linear in the "
        "cotangent that it is given, as one that clips it is not: the way back "
        "would have to be stored, and how long it is is not known. Take one of the "
        "derivatives in forward mode (`jax.jacfwd(jax.grad(f))`), or run the steps "
        "with `el.Scan`."
    )


def check_consts(axes: frozenset[str], consts: Arrays) -> None:
    """Checks the types of consts that have a cotangent.

    If such a const were the same on all devices, they would add up its cotangents, and
    so wait for each other, at every step.
    """
    if all(axes <= axes_of(const) for const in consts):
        return
    names = tuple(sorted(axes))
    raise ValueError(
        "A while loop that stops at its own time on each device cannot be "
        "differentiated in reverse mode with respect to arrays that are the same on "
        "all of them, if `body` closes over these. Make them leaves of `body`, as "
        f'those of a module are, or pass `jax.lax.pcast(x, {names}, to="varying")`.'
    )
