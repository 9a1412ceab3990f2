"""A given number of slots for a loop of any length: they move on as it grows longer.

`OnlineRun` is the way there. The way back starts from the carries that this has left.

Loops whose way back reads nothing but counters need no slots. A counter is an integer
of the carry that each step adds the same number to, such as the index of the row to
write next. Its value before step `i` is `start + i * stride`. So only the initial carry
is stored, and no step is run again. It gains: without, gradients of such loops take up
to twice as long on a CPU, and two to three times as long to compile.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, axes_of, pick, put_on_mesh, vary
from ..._programs import constant, mark
from ..._types import Aval, Index, Value
from ..engine._forward import Active
from ..engine._layout import AbstractLayout, Needs, Stored
from ..engine._problem import Problem
from ..engine._sweep import Cotangents, Sweep
from ..engine.orders import _binomial
from ..engine.orders._slot_stack import Chain, Stack
from ..engine.reversals._block_reversals import ByResiduals
from ..engine.slots._slots import Carries, DeviceSlots
from ..rewrites import _later_steps, _short_loops
from ..rewrites._later_steps import Steps, steps_to_run
from ..rewrites._short_loops import without_short_loops
from ..steps._loop import zero
from ..steps._rows_once import counter_strides
from ..steps._step import Step
from ._spread import Spread, Spreading, appended, full, move_on
from ._until_stop import (
    UNLIMITED,
    State,
    begun,
    goes_on,
    next_carry,
    run_until,
    sweeps_past,
)


@dataclasses.dataclass(frozen=True)
class Online(AbstractLayout):
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

    slots = DeviceSlots()
    reversal = ByResiduals()
    kept = None

    def _decide(self, problem: Problem[Any], active: Active) -> Self:
        """Itself, for every loop and every derivative: it is its own planner."""
        return self

    def for_needs(self, step: Step, needs: Needs) -> "Online":
        strides, (first, later) = strides_of(step, needs), steps_to_run(step)
        runs_first_alone = strides is None and self.max_steps > 1 and later is not first
        return dataclasses.replace(
            self, strides=strides, runs_first_alone=runs_first_alone
        )

    def notes(self, step: Step) -> list[str]:
        """What is done to a step where it is run and reversed, for a plan."""
        first, later = steps_to_run(step)
        notes = [_short_loops.NOTE] * (without_short_loops(step) is not step)
        return notes + [_later_steps.NOTE] * (later is not first)

    @property
    def spreading(self) -> Spreading:
        """How the slots move on as the loop goes on."""
        return Spreading(self.checkpoints, self.max_steps)

    @property
    def splits(self) -> bool:
        """Whether a segment may have to be split, since its rank is above 1."""
        return self.checkpoints > 1 and self._chain > self.spreading.most_thrice

    @property
    def carries(self) -> int:
        # The last row is no slot. Carries that are not to be stored are written there.
        return self.checkpoints + 1

    @property
    def reads_init(self) -> bool:
        return self.runs_first_alone or self.strides is not None

    @property
    def length(self) -> int | None:
        """The most steps, if there is a bound on them."""
        return None if self.max_steps == UNLIMITED else self.max_steps

    @property
    def stored(self) -> int:
        """How many carries are stored at once, at the most."""
        is_counted = self.strides is not None
        return 1 if is_counted else self.checkpoints + self.runs_first_alone

    @property
    def evaluations(self) -> int | None:
        """How often a gradient of `length` steps evaluates the step."""
        # The fewest possible; `_spread.py` says how many more there may be. The primal
        # runs each step, and the way back linearises each. The other evaluations are
        # advances from a stored carry.
        if self.length is None:
            return None
        is_counted = self.strides is not None
        again = _binomial.sweep_advances(self._chain, self.checkpoints)
        return 2 * self.length + (0 if is_counted else again)

    @property
    def _chain(self) -> int:
        """The most steps that are reversed from slots."""
        return self.max_steps - self.runs_first_alone

    def stored_types(self, carry_types: Sequence[Aval], held: Flags) -> Stored:
        """The types of what `forward` stores."""

        # Traced, since the type must name the mesh that is in use. They are the number
        # of steps, the starts of the segments, and the rows of their carries.
        def integers() -> list[Value]:
            shapes = (), (self.checkpoints,), (self.carries,)
            zeros = (put_on_mesh(jnp.zeros(shape, jnp.int32)) for shape in shapes)
            return [vary(x, axes_of(carry_types[0])) for x in zeros]

        carries = self.slots.types(pick(carry_types[1:], held), self.carries)
        return Stored.of(jax.make_jaxpr(integers)().out_avals, carries)

    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], Stored]:
        """Runs the loop, and gives its final carry and what `reverse` needs.

        `held` marks the leaves of a carry that slots hold, but for the first one.
        """
        carries = self.slots.filled(pick(init[1:], held), self.carries)
        spread = jax.tree.map(
            lambda x: vary(put_on_mesh(x), axes_of(init[0])), full(self.checkpoints)
        )
        steps = steps_to_run(step)
        later = steps.later if self.reads_init else steps.first
        state = begun(Steps(steps.first, later), consts, init)
        if self.strides is not None:
            state = run_until(later, consts, state, self.max_steps)
        else:
            first = int(self.runs_first_alone)
            settings = self.spreading, later, held, consts, self.max_steps, first
            state, spread, carries = OnlineRun(*settings).run((state, spread, carries))
        integers = [state[0], spread.starts, spread.rows]
        return state[1], Stored.of(integers, carries.arrays)

    def reverse(self, sweep: Sweep, stored: Stored, ct_carry: Arrays) -> Cotangents:
        """Takes cotangents of the final carry back, given what `forward` has stored."""
        _, starts, rows = stored.integers
        first, later = sweeps_past(sweep)
        carries = self.slots.holding(stored.carries, sweep.step.carry_types)
        cts = sweep.start(ct_carry, jax.tree.leaves(stored))
        if self.strides is not None:
            return reverse_by_counters(first, self.strides, sweep.init, cts)
        later = later.part(1) if self.runs_first_alone else first
        steps, reach = later.steps, None
        if self.splits:
            reach = constant(self.spreading.reach)
        # The number of steps is known by now. So from here on the order is the binomial
        # one, which starts from the carries that the primal has left.
        chain = Chain(later, self.checkpoints - 1, reach, order=rows)
        stack = self._stack(reach, steps, starts, carries)
        stack, cts = chain.reverse(stack, steps - 1, zero(), cts)
        return first.pull_first(sweep.init, 1, cts) if self.runs_first_alone else cts

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


# The state of the loop, the positions and rows of stored carries, and the carries.
Whole: TypeAlias = tuple[State, Spread, Carries]


@dataclasses.dataclass(frozen=True)
class OnlineRun:
    """One run of a loop.

    Attributes:
        rule: Which carries are stored.
        step: The step.
        held: Which leaves of a carry slots hold.
        consts: The consts of the step.
        max_steps: The position at which the loop ends at the latest.
        first: The position from which carries are stored. Positions of carries
            count from there.
    """

    rule: Spreading
    step: Step
    held: Flags
    consts: Arrays
    max_steps: int
    first: int = 0

    def run(self, whole: Whole) -> Whole:
        """Runs the loop from there on."""
        slots, steps = self.rule.checkpoints, self.max_steps - self.first
        # A loop of at most `s (s + 3) / 2` steps never leaves rank 1: this is the range
        # of the first algorithm of Stumm & Walther (2010).
        if 1 < slots < steps <= self.rule.most_thrice:
            return self._store_all(whole)
        # The other loops fill the slots first. Those that go on then spread them out.
        whole = self._fill(whole)
        if slots >= steps:
            return whole
        if slots > 1:
            return self._spread_out(whole)
        # The only slot keeps the initial carry: without it, no step could be reversed.
        state, spread, carries = whole
        state = run_until(self.step, self.consts, state, self.max_steps)
        return state, spread, carries

    def _fill(self, whole: Whole) -> Whole:
        """Stores every carry while there are free slots."""
        most = min(self.first + self.rule.checkpoints, self.max_steps)

        def body(whole: Whole) -> Whole:
            state, spread, carries = whole
            # Until a slot is given up, the carry at position `i` is in row `i`. `full`
            # has said so from the start, and `spread` needs no update.
            carries = self._stored(state, carries, self._position(state))
            return self._next(state), spread, carries

        return lax.while_loop(lambda whole: goes_on(whole[0], most), body, whole)

    def _store_all(self, whole: Whole) -> Whole:
        """Stores every carry, in a slot that is free or that is given up for it."""
        # This is for loops that are so short that segments never have a second rank.
        # `_spread_out` would have to start its inner loop at every step, and for a
        # small step that takes longer than looking for a free slot each time.

        def body(whole: Whole) -> Whole:
            state, spread, carries = whole
            position = self._position(state)
            has_free = position < self.rule.checkpoints
            # `move_on` computes with a few integers. While there are free slots, its
            # result is not used, and no branch is needed for that.
            row, moved = move_on(self.rule, spread, position)
            choose = lambda a, b: jnp.where(has_free, a, b)
            starts = choose(spread.starts, moved.starts)
            rows = choose(spread.rows, moved.rows)
            carries = self._stored(state, carries, choose(position, row))
            spread = spread._replace(starts=starts, rows=rows)
            return self._next(state), spread, carries

        return lax.while_loop(self._goes_on, body, whole)

    def _spread_out(self, whole: Whole) -> Whole:
        """Runs on when all slots are in use, from one carry to store to the next."""

        def body(whole: Whole) -> Whole:
            state, spread, carries = whole
            row, spread = move_on(self.rule, spread, self._position(state))
            # If no carry could be given up, this goes to the row that is no slot: a
            # branch around the write would copy the slots.
            carries = self._stored(state, carries, row)
            stop = jnp.minimum(spread.stop + self.first, self.max_steps)
            return run_until(self.step, self.consts, state, stop), spread, carries

        return lax.while_loop(self._goes_on, body, whole)

    def _position(self, state: State) -> Index:
        return state[0] - self.first if self.first else state[0]

    def _goes_on(self, whole: Whole) -> Value:
        return goes_on(whole[0], self.max_steps)

    def _stored(self, state: State, carries: Carries, row: Index) -> Carries:
        return carries.write(pick(state[1][1:], self.held), row)

    def _next(self, state: State) -> State:
        position, carry = state
        mark(position)
        return position + 1, next_carry(self.step, self.consts)(carry)


def strides_of(step: Step, needs: Needs) -> tuple[int, ...] | None:
    """The strides of the leaves that slots hold, if all of these are counters."""
    found = pick(counter_strides(step)[1:], needs.held)
    strides = tuple(stride for stride in found if stride is not None)
    return strides if len(strides) == len(found) else None


def reverse_by_counters(
    sweep: Sweep, strides: Sequence[int], init: Arrays, cts: Cotangents
) -> Cotangents:
    """Takes cotangents back to the start of a loop.

    `strides` has what a step adds to each leaf of the carry.
    """
    pairs = list(zip(init, strides, strict=True))

    def back(i: Index, cts: Cotangents) -> Cotangents:
        position = sweep.steps - 1 - i
        # Computed from the position, and not counted down: so the loop carries nothing
        # but cotangents.
        carry = [c + jnp.asarray(position * n, c.dtype) for c, n in pairs]
        return sweep.pull(carry, position, 1, cts)

    return lax.fori_loop(0, sweep.steps, back, cts)
