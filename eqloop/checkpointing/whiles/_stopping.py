"""Loops that end when their carry says so, and errors for what they cannot do.

A while loop is `UntilStopped`, and has a layout for loops of unknown length. A scan
that may end early is in `_ending.py`.
"""

import dataclasses
import functools
from typing import ClassVar, NoReturn, Self

import jax.extend.core as jex
from jax import lax

from ..._arrays import Arrays, axes_of, pick
from ..._programs import Formula, Selected, is_watched, vmapped, without_dead_code
from ..._types import BatchAxis, PyTree, Value
from ...progress import while_with_bar
from ..engine._backward_step import Back
from ..engine._forward import Active
from ..engine._layout import Saves, Stored
from ..engine._planned_loop import PlannedLoop
from ..engine._problem import Counted, L, Problem
from ..engine._sweep import Cotangents, Sweep
from ..rewrites._later_steps import steps_to_run
from ..steps._step import Step
from ._batch import joint_loop, stops_apart
from ._online import Online
from ._until_stop import UNLIMITED, begun, next_carry, run_until


@dataclasses.dataclass(frozen=True)
class AbstractStopping(Problem[L]):
    """A loop that goes on for as long as the first leaf of its carry says so.

    The derivatives of such a loop are such loops again, as with loops of known length.
    The loop of the step's jvp stops when the primal does: the condition is a boolean,
    which has no tangent, and it reads no tangents.

    Attributes:
        count_at: The place in the carry of the number of steps that have been run; 0 if
            it has none. Each joint loop of a batch puts one more leaf before it.
        joints: How many times examples were joined to one loop.
    """

    count_at: int = 0
    joints: int = 0

    instead_of_effects: ClassVar[str] = (
        "Run so many steps with `el.Scan` and `schedule=el.StoreAll()`"
    )
    lead: ClassVar[int] = 1

    def reversed_step(self, step: Step) -> Step:
        return unconditional(step)

    def check(self, active: Active, inputs: PyTree) -> None:
        """Checks the types of consts that have a cotangent, within a `shard_map`."""
        # If a const is the same on all devices, the transpose of the step adds up its
        # cotangents over all of them, at every step. Devices that ran fewer steps would
        # not take part, and the others would wait for them.
        axes = axes_of(inputs[1][0])
        consts = pick(self.step.const_types, active.consts)
        if all(axes <= axes_of(const) for const in consts):
            return
        names = tuple(sorted(axes))
        raise ValueError(
            "A while loop that stops at its own time on each device cannot be "
            "differentiated in reverse mode with respect to arrays that are the same "
            "on all of them, if `body` closes over these. Make them leaves of `body`, "
            "as those of a module are, or pass "
            f'`jax.lax.pcast(x, {names}, to="varying")`.'
        )

    def joined(self) -> Self:
        """This loop, whose carry has one more leaf at its start, see `_batch.py`."""
        return dataclasses.replace(self, joints=self.joints + 1)

    def batched_apart(
        self,
        formula: Formula,
        saves: Saves[L] | None,
        axis_data: BatchAxis,
        args: PyTree,
        dims: PyTree,
    ) -> tuple[Formula, PyTree, list[int | None]] | None:
        dims = tuple(map(tuple, dims))
        if not stops_apart(self, axis_data, dims):
            return None
        settings = self.count_at, self.joints > 0
        problem, consts, init = joint_loop(self, axis_data, args, dims, *settings)
        args = (consts, init, list(args[2]))
        # The joint carry starts with whether any example goes on, and then has whether
        # each of them does. `lead` counts the first; slots do not hold the second.
        problem = problem.joined()
        saves = saves and with_leaves(saves, 1 + self.lead - problem.lead)
        joint = PlannedLoop(problem, saves, args)
        # All outputs but whether any example goes on.
        carry, ys, stored = joint.out_aval
        shown = (False, *[True] * (len(joint.out_avals_flat) - 1))
        out_dims: list[int | None] = [
            *[0] * (len(carry) - 1),
            *[1] * len(ys),
            *[0] * len(stored.integers),
            *[1] * len(stored.carries),
            *[0] * len(stored.last),
        ]
        return Selected.of(joint, shown), args, out_dims

    def written_out(
        self, back: Back, step: Step, inputs: PyTree, ends: PyTree
    ) -> NoReturn:
        raise ValueError(
            "A while loop cannot be differentiated twice in reverse mode if there is a "
            "`jax.custom_vjp` in its body whose backward rule is not linear in the "
            "cotangent (for example, one that clips it): the backward pass would have "
            "to be stored, and its number of steps is not known. Take one of the "
            "derivatives in forward mode (`jax.jacfwd(jax.grad(f))`), or run the steps "
            "with `el.Scan`."
        )


def with_leaves(saves: Saves[L], count: int) -> Saves[L]:
    """What is saved of a carry with more leaves at its start, which are not stored."""
    return saves.of_leaves(lambda flags: (*[False] * count, *flags))


@functools.lru_cache(maxsize=128)
def unconditional(step: Step) -> Step:
    """The step without the first leaf of its carry, and what only this leaf needs."""
    # The way back takes as many steps as were run, and does not ask the condition
    # again.
    kept = [True] * len(step.jaxpr.in_avals)
    kept[step.num_consts] = False

    def without(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        used = [False] + [True] * (len(program.out_avals) - 1)
        return without_dead_code(program, used, kept)[0]

    inverse = step.inverse and without(step.inverse)
    program, saved = without(step.jaxpr), step.saved[1:]
    return Step(program, step.num_consts, step.num_carry - 1, inverse, saved)


@dataclasses.dataclass(frozen=True)
class UntilStopped(AbstractStopping[Online]):
    """A while loop: without `xs` and `ys`, and of unknown length.

    Under `vmap` each example stops at its own time.
    """

    has_xs = False

    @property
    def counted(self) -> Counted:
        """The loop of the same step that runs all steps: to tell what a step costs."""
        lead, loop = self.lead, self.loop
        paths, starts = loop.carry_paths[lead:], loop.starts[lead:]
        loop = dataclasses.replace(loop, carry_paths=paths, starts=starts)
        step: Step = self.reversed_step(self.step)
        return Counted(step, loop, self.policy, self.planner)

    def forward(
        self, saves: Saves[Online] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], Stored]:
        consts, init, _ = inputs

        def forward(init: Arrays) -> tuple[list[Value], Stored]:
            if saves is None:
                return _run_plain(
                    self.step, self.loop.length, consts, init
                ), Stored.of()
            return saves.layout.forward(self.step, saves.held, consts, init)

        carry, stored = while_with_bar(forward, self.loop.meter, consts, init)
        return carry, [], stored

    def stored_types(self, saves: Saves[Online]) -> Stored:
        return saves.layout.stored_types(self.step.carry_types, saves.held)

    def reverse(
        self, sweep: Sweep, layout: Online, stored: Stored, carried: Arrays
    ) -> Cotangents:
        return layout.reverse(sweep.until(stored.integers[0]), stored, carried)

    def batched_apart(
        self,
        formula: Formula,
        saves: Saves[Online] | None,
        axis_data: BatchAxis,
        args: PyTree,
        dims: PyTree,
    ) -> tuple[Formula, PyTree, list[int | None]] | None:
        # A gradient has been taken of each example, and then of the batch. The slots of
        # examples are spread over different numbers of steps, so the loops are not
        # joined: each example runs its own, as `vmap` has it.
        if saves is not None and stops_apart(self, axis_data, tuple(map(tuple, dims))):
            _refuse_explicit(axis_data)
            return vmapped(formula, axis_data, args, dims)
        return super().batched_apart(formula, saves, axis_data, args, dims)


def _refuse_explicit(axis_data: BatchAxis) -> None:
    """Checks that JAX can batch a reverse sweep whose examples ran differently long."""
    # The sweep reads its tables at one index for each example. If these indices are
    # split over devices, JAX cannot tell how the result is split.
    if axis_data.explicit_mesh_axis is not None:
        raise ValueError(
            f"`jax.vmap` over the gradient of a while loop along an axis that is split "
            f"over the explicit axes {axis_data.explicit_mesh_axis} of a mesh: each "
            f"example is reversed from its own last step, which JAX does not batch "
            f"there. Take the gradient of the batch instead, `jax.grad` of a sum over "
            f"the `jax.vmap`, or map with `el.ParallelMap`."
        )


def _run_plain(step: Step, max_steps: int, consts: Arrays, init: Arrays) -> list[Value]:
    """Runs the loop and stores nothing. Returns the final carry."""
    steps = steps_to_run(step)
    state = begun(steps, consts, init)
    # Steps are counted if there is a bound, or if somebody watches their positions.
    # Otherwise the loop carries no counter.
    if max_steps < UNLIMITED or is_watched.value:
        return run_until(steps.later, consts, state, max_steps)[1]
    again = lambda carry: carry[0]
    return lax.while_loop(again, next_carry(steps.later, consts), state[1])
