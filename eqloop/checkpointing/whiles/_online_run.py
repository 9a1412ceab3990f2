"""Runs a loop of unknown length, and stores carries as it goes on."""

import dataclasses
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, pick
from ..._programs import mark
from ..._types import Index, Value
from ..engine._step import Step
from ..engine.slots._slots import Carries
from ._spread import Spread, Spreading, move_on
from ._while_layout import State, goes_on, next_carry, run_until

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
        """Stores every carry, in a slot that is free or that is given up for it.

        This is for loops that are so short that segments never have a second rank.
        `_spread_out` would have to start its inner loop at every step, and for a small
        step that takes longer than looking for a free slot each time.
        """

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
