"""A given number of slots for a loop of any length: they move on as it grows longer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, axes_of, pick, put_on_mesh, vary
from ..._programs import constant, equations, mark
from ..._types import Index, Value
from ..engine._loop import element
from ..engine._short_loops import numbers_after, with_known
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.orders import _binomial
from ..engine.orders._slot_stack import Chain, Stack
from ..engine.slots._slots import Carries
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

# The highest rank in the table of reaches. With two slots, the reach at rank `r` is
# about `r**2 / 2` steps, so this is enough for a million of them.
_MOST_RANKS = 1500


@dataclasses.dataclass(frozen=True)
class Online(AbstractWhileLayout):
    """The carries of a loop of any length, in a given number of slots.

    The number of steps, the positions of the stored carries, their rows, and the slots
    are stored. `_spread.py` decides which carry is given up for a new one.

    Attributes:
        max_steps: The most steps that are run.
        checkpoints: How many carries are stored at once.
    """

    max_steps: int
    checkpoints: int

    @property
    def ranks(self) -> int:
        """The highest rank that a segment may get, see `_spread.py`."""
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
        """The fewest possible; `_spread.py` says how many more there may be."""
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

        def fill(state: tuple[State, Carries]) -> tuple[State, Carries]:
            (position, carry), carries = state
            carries = carries.write(pick(carry[1:], held), position)
            mark(position)
            return (position + 1, next_carry(step, consts)(carry)), carries

        # 1. Until the slots are full, each carry goes to the next row.
        has_room = lambda whole: goes_on(whole[0], most)
        state, carries = lax.while_loop(has_room, fill, (first_state(init), carries))
        spread = jax.tree.map(
            lambda x: vary(put_on_mesh(x), axes_of(init[0])), full(self)
        )
        # 2. After that, carries are given up for later ones; a single slot has the
        #    initial carry, and keeps it.
        if self.checkpoints == 1:
            state = run_until(step, consts, state, self.max_steps)
        elif most < self.max_steps:
            whole = (state, spread, carries)
            state, spread, carries = self._spread_out(step, held, consts, whole)
        count, carry = state
        return carry, [count, spread.starts, spread.rows, *carries.arrays]

    def _spread_out(
        self,
        step: Step,
        held: Flags,
        consts: Arrays,
        whole: tuple[State, Spread, Carries],
    ) -> tuple[State, Spread, Carries]:
        """Runs on when all slots are in use, from one carry to store to the next."""

        def body(
            whole: tuple[State, Spread, Carries],
        ) -> tuple[State, Spread, Carries]:
            state, spread, carries = whole
            position, carry = state
            row, spread = move_on(self, spread, position)
            # If none could be given up, this goes to the row that is no slot: a branch
            # around the write would copy the slots.
            carries = carries.write(pick(carry[1:], held), row)
            stop = jnp.minimum(spread.stop, self.max_steps)
            return run_until(step, consts, state, stop), spread, carries

        left = lambda whole: goes_on(whole[0], self.max_steps)
        return lax.while_loop(left, body, whole)

    def reverse(self, sweep: Sweep, saved: Arrays, ct_carry: Arrays) -> Cotangents:
        count, starts, rows, *slots = saved
        reach = constant(self.reach)
        # The first step is reversed by itself, if it is not like the others.
        later = past_later_steps(sweep)
        first = 0 if later is sweep else 1
        chain = Chain(later, self.checkpoints - 1, reach, order=rows)
        carries = self.slots.holding(slots, sweep.step.carry_types)
        stack = self._stack(reach, count, starts, carries)
        stack, cts = chain.reverse(stack, count - 1, first, sweep.start(ct_carry))
        if not first:
            return cts
        return sweep.pull_first(stack.carries.read(element(rows, 0)), 1, cts)

    def _stack(
        self, reach: Value, count: Index, starts: Any, carries: Carries
    ) -> Stack:
        """The slots as the primal leaves them; after few steps, some are free."""
        places = jnp.arange(self.checkpoints, dtype=jnp.int32)
        # For slots that are not in use, these numbers mean nothing, and are not read.
        lengths = appended(starts[1:], count) - starts
        # The rank of each segment, by its length and its place.
        longest = reach[self.checkpoints - places, 1:]
        ranks = jnp.sum(longest < lengths[:, None], axis=1, dtype=jnp.int32)
        table = jnp.stack([starts, ranks], axis=1)
        top = jnp.clip(count - 1, 0, self.checkpoints - 1)
        first, rank = table[top]
        return Stack(top, first, rank, table, carries)


def past_later_steps(sweep: Sweep) -> Sweep:
    """A sweep for all steps but the first; the very same if that makes no difference.

    The carry of many solvers has a flag that tells the first step from the others: a
    method that reuses the last evaluation of the step before has none to reuse there.
    After the first step the flag is known, and so are branches that depend on it.
    """
    back = sweep.back.mapped(_later)
    return sweep if back == sweep.back else dataclasses.replace(sweep, back=back)


@functools.lru_cache(maxsize=128)
def _later(step: Step) -> Step:
    """The step with what is known after a first one, if this decides any branch."""
    if not _count_branches(step):
        return step
    later = with_known(step, numbers_after(step))
    return later if _count_branches(later) < _count_branches(step) else step


def _count_branches(step: Step) -> int:
    return sum(eqn.primitive.name == "cond" for eqn in equations(step.jaxpr))
