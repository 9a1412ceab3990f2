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

import jax.numpy as jnp

from ..._arrays import Arrays, over_examples
from ..._types import PyTree, Value
from ...progress import NO_BARS, while_with_bar
from ..engine._forward import primal
from ..engine._layout import Layout, Saves, Stored
from ..engine._problem import Counted, slot_types
from ..engine._sweep import Cotangents, Sweep
from ..rewrites._short_loops import without_short_loops
from ..steps._dce import dce_step
from ..steps._step import Step
from ._stopping import AbstractStopping, unconditional, with_leaves

_most = over_examples(jnp.max)


@dataclasses.dataclass(frozen=True)
class Ending(AbstractStopping[Layout]):
    """A number of steps, or fewer if the first leaf of the carry says so."""

    count_at: int = 1

    # Of examples that were joined more than once, these are all leaves that say whether
    # any goes on.
    @property
    def lead(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return max(self.joints, 1)

    def reversed_step(self, step: Step) -> Step:
        return _without_leaves(step, self.lead)

    @property
    def own_leaves(self) -> int:
        return self.count_at + 1

    def in_lockstep(self) -> Self:
        # The number of steps is one of the leaves that are added.
        return dataclasses.replace(self, count_at=1, joints=0)

    @property
    def as_planned(self) -> Counted:
        # Slots have their places before it is known where the loop ends. So the plan is
        # that of a loop which runs all steps.
        loop = dataclasses.replace(self.loop, stops=False)
        return Counted(**self.settings(loop=loop), ending=self)

    @property
    def row_step(self) -> Step:
        # Its first leaf says whether an example goes on.
        return _without_leaves(self.step, self.joints)

    def by_runner(
        self, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]] | None:
        consts, init, xs = inputs
        saves = saves and with_leaves(saves, self.lead - self.joints)
        ran = super().by_runner(saves, (consts, init[self.joints :], xs))
        if ran is None:
            return None
        (goes_on, *carry), ys, carries = ran
        axes = range(self.joints), range(goes_on.ndim)
        any_goes_on = [jnp.any(goes_on, tuple(axes[1][i:])) for i in axes[0]]
        return [*any_goes_on, goes_on, *carry], ys, carries

    def forward(
        self, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], Stored]:
        if (ran := self.by_runner(saves, inputs)) is not None:
            carry, ys, carries = ran
            counts = [] if saves is None else [carry[self.count_at]]
            return carry, ys, Stored.of(counts, carries)
        consts, init, xs = inputs
        step = dce_step(self.step)
        # The steps report here, not the loop.
        loop = dataclasses.replace(self.loop, meter=NO_BARS)

        def forward(init: Arrays) -> tuple[list[Value], Value]:
            if saves is None:
                reached = primal(step, loop, consts, init, xs)
                return reached.carry, (reached.ys, Stored.of())
            layout, held = saves.layout, with_leaves(saves, self.lead).held
            order = layout.order.by_carries()
            inputs = order.checked(step, loop, held, (consts, init, xs))
            segments = order.in_segments(step, loop, inputs[0], inputs[2])
            reached, carries = layout.slots.sweep(segments, held, inputs[1])
            count = reached.carry[self.count_at]
            return reached.carry, (reached.ys, Stored.of([count], carries))

        carry, (ys, stored) = while_with_bar(forward, self.loop.meter, consts, init)
        return carry, ys, stored

    def stored_types(self, saves: Saves[Layout]) -> Stored:
        types, whole = self.step.carry_types, with_leaves(saves, self.lead)
        return Stored.of([types[self.count_at]], slot_types(self.step, whole))

    def reverse(
        self, sweep: Sweep, layout: Layout, stored: Stored, carried: Arrays
    ) -> Cotangents:
        (own,) = stored.integers
        of_runner = dataclasses.replace(sweep, own=own)
        runner = layout.runner
        ran = runner and runner.reverse(of_runner, layout, stored.carries, carried)
        if ran is not None:
            return ran
        # In a joint loop, `own` has an entry for each example. There the step selects
        # itself for which examples it is run, so all of them count as having run most.
        # A batch of gradients is different: `own` is a number under `vmap`. `_most` is
        # the largest one in either case.
        most = _most(own)
        own = most if own.ndim else own
        step, back = sweep.step, sweep.back
        step, back = dce_step(step), back.with_steps(without_short_loops)
        sweep = dataclasses.replace(sweep, step=step, back=back, own=own).until(most)
        return layout.reverse(sweep, stored, carried)

    def joined(self) -> Self:
        joined = super().joined()
        return dataclasses.replace(joined, count_at=self.count_at + 1)


def _without_leaves(step: Step, count: int) -> Step:
    """The step without the first leaves of its carry, which it does not read."""
    for _ in range(count):
        step = unconditional(step)
    return step
