"""A given number of slots for a loop of any length: they move on as it grows longer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._arrays import Arrays, Flags, axes_of, pick, put_on_mesh, vary
from ..._programs import constant
from ..._types import Index, Value
from ..engine._layout import Needs, Stored
from ..engine._loop import zero
from ..engine._step import Step
from ..engine._sweep import Cotangents, Sweep
from ..engine.orders import _binomial
from ..engine.orders._slot_stack import Chain, Stack
from ..engine.slots._slots import Carries
from ._by_counters import reverse_by_counters, strides_of
from ._later_steps import run_all, steps_to_run, sweeps_past
from ._online_run import OnlineRun
from ._spread import Spreading, appended, full
from ._while_layout import (
    UNLIMITED,
    AbstractWhileLayout,
    first_state,
    run_until,
)


@dataclasses.dataclass(frozen=True)
class Online(AbstractWhileLayout):
    """The carries of a loop of any length, in a given number of slots.

    The number of steps, the positions of the stored carries, their rows, and the slots
    are stored. `_spread.py` decides which carry is given up for a new one.

    Attributes:
        max_steps: The most steps that are run.
        checkpoints: How many carries are stored at once.
        strides: What each step adds to the leaves that slots hold, if the way back
            reads nothing but counters: then only the initial carry is stored.
        runs_first_alone: Whether the first step is run, and reversed, by itself, since
            more is known of the others. Its carry is in no slot, but read among the
            inputs.
        is_open: Whether a `Fit` may choose another number of checkpoints.
    """

    max_steps: int
    checkpoints: int
    strides: tuple[int, ...] | None = None
    runs_first_alone: bool = False
    is_open: bool = False

    def for_needs(self, step: Step, needs: Needs) -> "Online":
        strides, (first, later) = strides_of(step, needs), steps_to_run(step)
        runs_first_alone = strides is None and self.max_steps > 1 and later is not first
        return dataclasses.replace(
            self, strides=strides, runs_first_alone=runs_first_alone
        )

    @property
    def spreading(self) -> Spreading:
        """How the slots move on as the loop goes on."""
        return Spreading(self.checkpoints, self.max_steps)

    @property
    def splits(self) -> bool:
        """Whether a segment may have to be split, since its rank is above 1."""
        chain = self.max_steps - self.runs_first_alone
        return self.checkpoints > 1 and chain > self.spreading.most_thrice

    @property
    def integers(self) -> Sequence[tuple[int, ...]]:
        # The number of steps, the starts of the segments, and the rows of their
        # carries.
        return [(), (self.checkpoints,), (self.checkpoints + 1,)]

    @property
    def rows(self) -> int:
        # The last row is no slot. Carries that are not to be stored are written there.
        return self.checkpoints + 1

    @property
    def reads_init(self) -> bool:
        return self.runs_first_alone or self.strides is not None

    @property
    def length(self) -> int | None:
        return None if self.max_steps == UNLIMITED else self.max_steps

    @property
    def stored(self) -> int:
        return (
            1 if self.strides is not None else self.checkpoints + self.runs_first_alone
        )

    @property
    def evaluations(self) -> int | None:
        """The fewest possible; `_spread.py` says how many more there may be."""
        if self.length is None:
            return None
        if self.strides is not None:
            return 2 * self.length
        chain = self.length - self.runs_first_alone
        # The primal runs each step, and the way back linearises each. The other
        # evaluations are advances from a stored carry.
        return 2 * self.length + _binomial.sweep_advances(chain, self.checkpoints)

    @property
    def setting(self) -> str:
        return f"checkpoints={self.checkpoints}"

    @property
    def evaluations_described(self) -> str:
        if self.strides is not None:
            return "2 a step"
        if self.length is None:
            return f"3 a step up to {self.spreading.most_thrice} steps"
        is_exact = self.length <= self.spreading.most_thrice
        return f"{'<=' if is_exact else 'about'} {self.evaluations}"

    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], Stored]:
        carries = self.slots.filled(pick(init[1:], held), self.rows)
        spread = jax.tree.map(
            lambda x: vary(put_on_mesh(x), axes_of(init[0])), full(self.checkpoints)
        )
        steps, state = steps_to_run(step), first_state(init)
        if self.strides is not None:
            count, carry = run_all(steps, consts, init, self.max_steps)
            return carry, Stored.of([count, spread.starts, spread.rows], carries.arrays)
        later = steps.first
        if self.runs_first_alone:
            state, later = run_until(steps.first, consts, state, 1), steps.later
        running = OnlineRun(
            self.spreading,
            later,
            held,
            consts,
            self.max_steps,
            int(self.runs_first_alone),
        )
        (count, carry), spread, carries = running.run((state, spread, carries))
        return carry, Stored.of([count, spread.starts, spread.rows], carries.arrays)

    def reverse(self, sweep: Sweep, stored: Stored, ct_carry: Arrays) -> Cotangents:
        _, starts, rows = stored.integers
        past = sweeps_past(sweep)
        carries = self.slots.holding(stored.carries, sweep.step.carry_types)
        cts = sweep.start(ct_carry, jax.tree.leaves(stored))
        if self.strides is not None:
            return reverse_by_counters(past.first, self.strides, sweep.init, cts)
        later = past.later.part(1) if self.runs_first_alone else past.first
        steps, reach = later.steps, None
        if self.splits:
            reach = constant(self.spreading.reach)
        # The number of steps is known by now. So from here on the order is the binomial
        # one, which starts from the carries that the primal has left.
        chain = Chain(later, self.checkpoints - 1, reach, order=rows)
        stack = self._stack(reach, steps, starts, carries)
        stack, cts = chain.reverse(stack, steps - 1, zero(), cts)
        return (
            past.first.pull_first(sweep.init, 1, cts) if self.runs_first_alone else cts
        )

    def _stack(
        self, reach: Value, count: Index, starts: Any, carries: Carries
    ) -> Stack:
        """The slots as the primal leaves them; after few steps, some are free."""
        top = jnp.clip(count - 1, 0, self.checkpoints - 1)
        if reach is None:
            return Stack(top, starts[top], None, starts, None, carries)
        places = jnp.arange(self.checkpoints, dtype=jnp.int32)
        # For slots that are not in use, these numbers mean nothing, and are not read.
        lengths = appended(starts[1:], count) - starts
        # The rank of each segment, by its length and its place.
        # It is the least one at which the segment is within its reach. Reaches increase
        # with the rank, so it is the number of ranks from 0 on that do not suffice.
        longest = reach[self.checkpoints - places, 1:]
        ranks = jnp.sum(longest < lengths[:, None], axis=1, dtype=jnp.int32)
        return Stack(top, starts[top], ranks[top], starts, ranks, carries)
