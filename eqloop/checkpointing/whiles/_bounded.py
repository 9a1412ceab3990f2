"""Nested levels for the greatest number of steps, of which only the first are run."""

import dataclasses
from collections.abc import Sequence

from jax import lax

from ..._arrays import Arrays, Flags, pick
from ..._programs import constant
from ..._types import Index, Value
from ..engine._layout import Layout, Stored
from ..engine._short_loops import without_short_loops
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.leaves._dce import dce_step
from ..engine.orders._levels import nests
from ..engine.orders._nested import Nested
from ._while_layout import AbstractWhileLayout, State, first_state, run_until


@dataclasses.dataclass(frozen=True)
class Bounded(AbstractWhileLayout):
    """The order of a loop of `max_steps` steps, of which only the first ones are run.

    The number of steps and the slots are stored. Segments that are not run take no
    time on the way back, but their slots are there.
    """

    max_steps: int
    base: int

    @property
    def order(self) -> Nested:
        """The order of a loop that runs all `max_steps` steps."""
        return Nested(nests(self.max_steps, self.base))

    @property
    def integers(self) -> Sequence[tuple[int, ...]]:
        return [()]

    @property
    def rows(self) -> int:
        return len(self.order.starts)

    @property
    def length(self) -> int:
        return self.max_steps

    @property
    def stored(self) -> int:
        return self.order.slots

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        return self.order.levels

    @property
    def evaluations(self) -> int:
        return self.order.evaluations

    @property
    def setting(self) -> str:
        return f"base={self.base}"

    @property
    def evaluations_described(self) -> str:
        return f"<= {self.evaluations}"

    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], Stored]:
        step = dce_step(step)

        # The slots are stacked by a scan, and not carried by the while loop within it.
        # Under `vmap`, a while loop selects between old and new carry for each example
        # at every step, and so would copy all slots.
        def segment(state: State, stop: Index) -> tuple[State, list[Value]]:
            kept = self.slots.packed(pick(state[1][1:], held))
            return run_until(step, consts, state, stop), kept

        # Segments after the end run no step: the carry says stop when they begin. Their
        # slots hold the final carry, which is never read.
        stops = constant([*self.order.starts[1:], self.max_steps])
        (count, carry), slots = lax.scan(segment, first_state(init), stops)
        return carry, Stored.of([count], slots)

    def reverse(self, sweep: Sweep, stored: Stored, ct_carry: Arrays) -> Cotangents:
        step, back = dce_step(sweep.step), sweep.back.mapped(without_short_loops)
        sweep = dataclasses.replace(sweep, step=step, back=back)
        return Layout(self.order, self.slots).reverse(sweep, stored, ct_carry)
