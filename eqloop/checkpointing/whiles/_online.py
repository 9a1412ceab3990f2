"""Slots that are moved on as the loop turns out to be longer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._array_types import axes_of, put_on_mesh, vary
from ..._constant import constant
from ..._loop_markers import mark
from ..._partition import Arrays, Flags, pick
from ..._typecheck import PyTree
from ..._types import Index, Value
from ..engine._loop import element
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.orders import _binomial
from ..engine.orders._slot_stack import Chain, Stack
from ..engine.slots._slots import Carries
from ._later_steps import steps_to_run, sweeps_past
from ._spread import Spread, appended, full, move_on
from ._while_layout import (
    UNLIMITED,
    AbstractWhileLayout,
    State,
    first_state,
    goes_on,
    next_carry,
    run_until,
)

# No step is run again more often than this, however long the loop and few the slots;
# with two slots it is enough for a million steps.
_MOST_RANKS = 1500


@dataclasses.dataclass(frozen=True)
class Online(AbstractWhileLayout):
    """The carries of a loop of any length in a given number of slots.

    Saved are the number of steps, the positions of the slots and their rows, and the
    slots. Which carry gives way to a new one is decided in `_spread.py`.

    Attributes:
        max_steps: The most steps that are run.
        checkpoints: How many carries are stored at once.
    """

    max_steps: int
    checkpoints: int

    @property
    def ranks(self) -> int:
        """The highest rank that a segment may come to have, see `_spread.py`."""
        if self.checkpoints == 1:
            return 1
        return min(_binomial.rank_of(self.max_steps, self.checkpoints) + 1, _MOST_RANKS)

    @property
    def reach(self) -> list[list[int]]:
        """The table by which segments are merged, and split on the way back."""
        return _binomial.reach_table(self.checkpoints, self.ranks, UNLIMITED)

    @property
    def integers(self) -> Sequence[tuple[int, ...]]:
        return [(), (self.checkpoints,), (self.rows,)]

    @property
    def rows(self) -> int:
        return self.checkpoints + 1

    @property
    def length(self) -> int | None:
        return None if self.max_steps == UNLIMITED else self.max_steps

    @property
    def stored(self) -> int:
        return self.checkpoints

    @property
    def evaluations(self) -> int | None:
        """The fewest that are possible; `_spread.py` says how many more it may take."""
        if self.length is None:
            return None
        return 2 * self.length + _binomial.sweep_advances(self.length, self.stored)

    @property
    def setting(self) -> str:
        return f"checkpoints={self.checkpoints}"

    @property
    def evaluations_described(self) -> str:
        thrice = self.checkpoints * (self.checkpoints + 3) // 2
        if self.length is None:
            return f"3 a step up to {thrice} steps"
        return f"{'<=' if self.length <= thrice else 'about'} {self.evaluations}"

    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], list[Value]]:
        carries = self.slots.filled(pick(init[1:], held), self.rows)
        most = min(self.checkpoints, self.max_steps)
        steps = steps_to_run(step)

        def fill(step: Step, stop: int, whole: PyTree) -> PyTree:
            def body(whole: tuple[State, Carries]) -> tuple[State, Carries]:
                (position, carry), carries = whole
                carries = carries.write(pick(carry[1:], held), position)
                mark(position)
                return (position + 1, next_carry(step, consts)(carry)), carries

            return lax.while_loop(lambda whole: goes_on(whole[0], stop), body, whole)

        whole = first_state(init), carries
        if steps.later is not steps.first:
            whole = fill(steps.first, 1, whole)
        state, carries = fill(steps.later, most, whole)
        spread = jax.tree.map(
            lambda x: vary(put_on_mesh(x), axes_of(init[0])), full(self)
        )
        if self.checkpoints == 1:
            state = run_until(steps.later, consts, state, self.max_steps)
        elif most < self.max_steps:
            whole = (state, spread, carries)
            state, spread, carries = self._spread_out(steps.later, held, consts, whole)
        count, carry = state
        return carry, [count, spread.starts, spread.rows, *carries.arrays]

    def _spread_out(
        self,
        step: Step,
        held: Flags,
        consts: Arrays,
        whole: tuple[State, Spread, Carries],
    ) -> tuple[State, Spread, Carries]:
        """Runs on when all slots are in use."""

        def body(
            whole: tuple[State, Spread, Carries],
        ) -> tuple[State, Spread, Carries]:
            state, spread, carries = whole
            position, carry = state
            row, spread = move_on(self, spread, position)
            carries = carries.write(pick(carry[1:], held), row)
            stop = jnp.minimum(spread.stop, self.max_steps)
            return run_until(step, consts, state, stop), spread, carries

        left = lambda whole: goes_on(whole[0], self.max_steps)
        return lax.while_loop(left, body, whole)

    def reverse(self, sweep: Sweep, saved: Arrays, ct_carry: Arrays) -> Cotangents:
        count, starts, rows, *slots = saved
        reach, sweeps = constant(self.reach), sweeps_past(sweep)
        carries = self.slots.holding(slots, sweep.step.carry_types)
        has_first = sweeps.later is not sweeps.first
        first_row = element(rows, 0)
        init = carries.read(first_row)
        if has_first:
            # The first segment starts behind the first step, if it is any longer.
            end = appended(starts[1:], count)[0]
            carry = sweeps.first.advance_to(init, 0, jnp.clip(end - 1, 0, 1))
            starts, carries = starts.at[0].set(1), carries.write(carry, first_row)
        chain = Chain(sweeps.later, self.checkpoints - 1, reach, order=rows)
        stack = self._stack(reach, count, starts, carries)
        cts = sweep.start(ct_carry)
        _, cts = chain.reverse(stack, count - 1, int(has_first), cts)
        return sweeps.first.pull_first(init, 1, cts) if has_first else cts

    def _stack(
        self, reach: Value, count: Index, starts: Any, carries: Carries
    ) -> Stack:
        """The slots as the primal leaves them: after few steps, some are free."""
        places = jnp.arange(self.checkpoints, dtype=jnp.int32)
        # Beyond the slots in use this is meaningless, and is not read.
        lengths = appended(starts[1:], count) - starts
        longest = reach[self.checkpoints - places, 1:]
        ranks = jnp.sum(longest < lengths[:, None], axis=1, dtype=jnp.int32)
        table = jnp.stack([starts, ranks], axis=1)
        top = jnp.clip(count - 1, 0, self.checkpoints - 1)
        first, rank = table[top]
        return Stack(top, first, rank, table, carries)
