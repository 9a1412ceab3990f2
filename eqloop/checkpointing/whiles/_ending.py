"""A scan that may end before its length, with `xs` and `ys`, under any layout.

The first leaf of the carry says whether there is another step, and a later leaf counts
the steps that were run. The layout is that of a loop of full length. The primal fills
the slots of the steps that it runs, and the reverse sweep starts at the last of these:

    slots    |       |       |       .       .
    steps    0 1 2 3 4 5 6 7 8 9             length
                               ^ the loop has ended here

Under `vmap` the examples of a batch share one loop, which goes on for as long as any of
them does (`_batch.py`). This is so in a gradient of the batch and in a batch of
gradients: if each example had a loop of its own, JAX would copy slots and `ys` at every
step.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from ..._arrays import Arrays, over_examples
from ..._programs import Formula, Selected
from ..._types import Aval, BatchAxis, PyTree, Value
from ...progress import NO_BARS, sweep_with_bar, while_with_bar
from ..engine._by_segments import BySegments
from ..engine._forward import Active, primal
from ..engine._layout import Layout
from ..engine._primitive import PlannedLoop
from ..engine._problem import Problem
from ..engine._repetition import Counted, L
from ..engine._short_loops import without_short_loops
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.leaves._saves import Saves
from ._batch import joint_loop, stops_apart
from ._early_ends import only_run
from ._stopping import AbstractStopping

_most = over_examples(jnp.max)


@dataclasses.dataclass(frozen=True)
class Ending(AbstractStopping[Layout]):
    """A number of steps, or fewer if the first leaf of the carry says so.

    Attributes:
        count_at: The place in the carry of the number of steps that have been run. Each
            joint loop of a batch puts one more leaf before it.
    """

    count_at: int = 1

    @property
    def own_leaves(self) -> int:
        return self.count_at + 1

    def in_lockstep(self) -> Self:
        # The number of steps is one of the leaves that are added.
        return dataclasses.replace(self, count_at=1)

    def layout(self, problem: Problem, active: Active) -> Layout:
        # JAX cannot differentiate a `while_loop` in reverse mode, so the primal cannot
        # store residuals.
        return self.planned(problem).layout(active).by_carries()

    def planned(self, problem: Problem) -> Problem:
        loop = dataclasses.replace(problem.loop, stops=False)
        return dataclasses.replace(problem, loop=loop, repetition=Counted(self))

    def run(
        self, problem: Problem, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]]:
        consts, init, xs = inputs
        step = only_run(problem.step)
        # The steps report here, not the loop.
        loop = dataclasses.replace(problem.loop, meter=NO_BARS)

        def forward(init: Arrays) -> tuple[list[Value], Value]:
            if saves is None:
                carry, ys = primal(step, loop, consts, init, xs)
                return carry, (ys, [])
            layout, held = saves.layout, _of_whole_carry(saves).held
            order = layout.order.by_carries()
            segments = BySegments(step, loop, order, consts, xs)
            carry, ys, slots = layout.slots.sweep(segments, held, init)
            return carry, (ys, [carry[self.count_at], *slots])

        carry, (ys, saved) = while_with_bar(forward, problem.loop.meter, consts, init)
        return carry, ys, saved

    def saved_types(self, step: Step, saves: Saves[Layout]) -> list[Aval]:
        slots = Counted().saved_types(step, _of_whole_carry(saves))
        return [step.carry_types[self.count_at], *slots]

    def reverse(
        self, sweep: Sweep, layout: Layout, saved: Arrays, carried: Arrays
    ) -> Cotangents:
        own, *slots = saved
        # In a joint loop, `own` has an entry for each example. There the step selects
        # itself for which examples it is run, so all of them count as having run most.
        # A batch of gradients is different: `own` is a number under `vmap`. `_most` is
        # the largest one in either case.
        most = _most(own)
        own = most if own.ndim else own
        step, back = only_run(sweep.step), sweep.back.mapped(without_short_loops)
        sweep = dataclasses.replace(sweep, step=step, back=back, count=most, own=own)
        run = lambda sweep, carried: sweep.run(layout, slots, carried)
        return sweep_with_bar(run, sweep, carried, [*jax.tree.leaves(saved), *sweep.zs])

    def batched(
        self, formula: PlannedLoop, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        dims = tuple(map(tuple, dims))
        has_slots = formula.saves is not None
        if not stops_apart(formula.problem, axis_data, dims):
            return super().batched(formula, axis_data, args, dims)
        problem, consts, init = joint_loop(formula.problem, axis_data, args, dims)
        repetition = Ending(self.count_at + 1)
        problem = dataclasses.replace(problem, repetition=repetition)
        args = (consts, init, list(args[2]))
        # The joint carry starts with whether any example goes on, and then has whether
        # each of them does. `lead` counts the first; slots do not hold the second.
        saves = formula.saves and _of_whole_carry(formula.saves)
        joint = PlannedLoop(problem, saves, args)
        # All outputs but whether any example goes on.
        carry, ys, saved = joint.out_aval
        shown = (False, *[True] * (len(carry) - 1 + len(ys) + len(saved)))
        last = sum(saves.needs.final) if saves else 0
        slot_dims = [0, *[1] * (len(saved) - 1 - last), *[0] * last] * has_slots
        out_dims: list[int | None] = [
            *[0] * (len(carry) - 1),
            *[1] * len(ys),
            *slot_dims,
        ]
        return Selected.of(joint, shown), args, out_dims


def _of_whole_carry(saves: Saves[L]) -> Saves[L]:
    """The same for a carry with one more leaf at its start, which is not stored."""
    return saves.of_leaves(lambda flags: (False, *flags))
