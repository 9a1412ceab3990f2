"""Mixed storage: free slots hold the residuals of steps that are reversed soon.

The arithmetic is in `_mixed_chain.py`. How residuals are put into slots that are made
for carries is in `_kept_steps.py`.

It saves time: without it, a GRU of width 128 within 68 kB takes 2.1 times as long on a
CPU, and the wave equation takes 1.05 to 1.2 times as long.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays import axes_of, vary
from ...._programs import constant
from ...._types import Index, PyTree, Value
from ...steps._loop import element, store
from .._costs import StepCost
from .._pace import Pace
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries
from ._kept_steps import Kept, kept_of
from ._mixed_chain import MixedChain
from ._order import AbstractSlotOrder, Event

# A step with residuals in slots is estimated to take as long as one in a block of this.
_LONG_BLOCK = 64


class _Stack(NamedTuple):
    """The slots in use, each of which has the carry at the start of a segment.

    Attributes:
        stop: The end of the last segment. All steps from here on have been reversed.
        top: The last slot in use.
        starts: The position at which the segment of each slot starts.
        carries: The slots.
    """

    stop: Index
    top: Index
    starts: jax.Array
    carries: Carries


@dataclasses.dataclass(frozen=True)
class Mixed(AbstractSlotOrder):
    """Single steps, reversed with slots that hold either carries or residuals.

    If the residuals of a step are no larger than a few carries, this takes fewer
    evaluations than any order of carries with the same memory. Trip counts depend on
    the position, so they are dynamic.

    Attributes:
        steps: How many steps the loop has.
        checkpoints: How many slots there are.
        rows: How many slots the residuals of one step take.
    """

    steps: int
    checkpoints: int
    rows: int

    @property
    def length(self) -> int:
        return self.steps

    @property
    def slots(self) -> int:
        return min(self.checkpoints, self.steps)

    @property
    def chain(self) -> MixedChain:
        return MixedChain(self.steps, self.slots, self.rows)

    @property
    def starts(self) -> Sequence[int]:
        return [0, *itertools.accumulate(self.chain.segments[:-1])]

    @property
    def advances(self) -> int:
        return self.chain.advances

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        kept = kept_of(sweep, carries, self.rows)
        # The table is a constant of the program, and splits are looked up as it runs.
        # If the recursion were traced, the program would grow with the loop.
        longest = constant([list(column) for column in self.chain.longest])

        def reverse_segment(state: tuple[_Stack, Cotangents]) -> PyTree:
            stack, cts = state
            stack = self._split(sweep, stack, longest)
            return self._reverse_last(sweep, stack, kept, cts)

        left = lambda state: state[0].stop > 0
        state = self._stack(sweep, carries), cts
        return lax.while_loop(left, reverse_segment, state)[1]

    def _stack(self, sweep: Sweep, carries: Carries) -> _Stack:
        """The slots as the primal leaves them: all in use, unless it ended early."""
        starts, last = constant(self.starts), jnp.asarray(self.slots - 1, jnp.int32)
        if sweep.count is None:
            return _Stack(jnp.asarray(self.steps, jnp.int32), last, starts, carries)
        stop = jnp.clip(sweep.count, 0, self.steps).astype(jnp.int32)
        top = jnp.maximum(jnp.sum(starts < stop, dtype=jnp.int32) - 1, 0)
        # Each device may have run as many steps as it needed.
        return _Stack(stop, top, vary(starts, axes_of(stop)), carries)

    def _split(self, sweep: Sweep, stack: _Stack, longest: jax.Array) -> _Stack:
        """Splits the last segment until its rank is 0 or no slot is free.

        The new carries are stored on the way, as in `_slot_stack.Chain.split`. The rank
        is not stored but looked up: it follows from the length and the free slots.
        """

        def rank_of(stack: _Stack) -> jax.Array:
            length, free = self._size(stack)
            return jnp.sum(element(longest, free, 1) < length, dtype=jnp.int32)

        def unfinished(stack: _Stack) -> jax.Array:
            return (stack.top < self.slots - 1) & (rank_of(stack) > 0)

        def move(stack: _Stack) -> _Stack:
            length, free = self._size(stack)
            # This is `_mixed_chain._split_at`, for numbers that are known only here.
            below = element(longest, rank_of(stack) - 1)
            ahead = length - element(below, free - 1)
            start = element(stack.starts, stack.top)
            middle = start + jnp.minimum(element(below, free), ahead)
            carry = stack.carries.read(stack.top)
            carry = sweep.advance_to(carry, start, middle)
            top = stack.top + 1
            starts = store(stack.starts, middle, top)
            return _Stack(stack.stop, top, starts, stack.carries.write(carry, top))

        return lax.while_loop(unfinished, move, stack)

    def _size(self, stack: _Stack) -> tuple[Value, Value]:
        """The length of the last segment, and the slots for it, its own included."""
        length = stack.stop - element(stack.starts, stack.top)
        return length, self.slots - stack.top

    def _reverse_last(
        self, sweep: Sweep, stack: _Stack, kept: Kept, cts: Cotangents
    ) -> tuple[_Stack, Cotangents]:
        """Reverses the last segment, or only its last step if no slot is free.

        Steps from `first` on are run once more, and all but the last leave what they
        keep in free slots. Then they are reversed.
        """
        start, last = element(stack.starts, stack.top), stack.stop - 1
        # A `cond` would do, too, but XLA may copy slots that go through its branches.
        first = jnp.where(stack.top < self.slots - 1, start, last)
        # Each step takes `kept.rows` slots behind the last one in use.
        row_of = lambda position: stack.top + 1 + (position - first) * kept.rows

        def keep(
            state: tuple[Index, list[Value], Carries],
        ) -> tuple[Index, list[Value], Carries]:
            position, carry, carries = state
            carries = kept.write(carries, carry, position, row_of(position))
            return position + 1, sweep.advance(carry, position, 1), carries

        def pull(state: tuple[Index, Cotangents]) -> tuple[Index, Cotangents]:
            position = state[0] - 1
            cts = kept.pull(carries, position, row_of(position), state[1])
            return position, cts

        carry = stack.carries.read(stack.top)
        # Stage 1: go to `first`, which is no step if the whole segment is reversed.
        carry = sweep.advance_to(carry, start, first)
        unfinished = lambda state: state[0] < last
        state = first, carry, stack.carries
        # Stage 2: keep all of these steps but the last.
        _, carry, carries = lax.while_loop(unfinished, keep, state)
        # Stage 3: reverse the last step. The carry before it is at hand, so it needs no
        # slot: that is the `1 +` in `longest(slots, 0)`.
        cts = sweep.pull(carry, last, 1, cts)
        # Stage 4: reverse those that were kept, last to first.
        _, cts = lax.while_loop(lambda state: state[0] > first, pull, (last, cts))
        # The slot of a segment that is done is free. The first slot stays in place:
        # `stop`, not an empty stack, ends the loop.
        top = jnp.where(first == start, jnp.maximum(stack.top - 1, 0), stack.top)
        return _Stack(first, top, stack.starts, carries), cts

    # What it costs.

    def inner_bytes(self, cost: StepCost) -> int:
        # The start of a slot's segment takes four bytes.
        return self.slots * 4

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        kept, rate = self.chain.kept, pace.rate
        single = (self.steps - kept) * pace.block(reversal, 1)
        stored = kept * pace.block(reversal, _LONG_BLOCK) / _LONG_BLOCK
        # Each run of consecutive steps ends with one that is reversed from its carry.
        runs = (self.steps - kept) * rate.run
        dynamic = self.steps + kept + self.advances
        return single + stored + runs + dynamic * rate.dynamic_iteration

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        rows = super().described(cost)
        one = "a slot that was free"
        slots = one if self.rows == 1 else f"{self.rows} slots that were free"
        text = f"of {self.chain.kept} steps, each in {slots}"
        return [*rows, ("stored residuals", text)]

    # How it is shown.

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        besides = slots - self.slots
        segments = list(zip(self.starts, self.chain.segments, strict=True))
        for row, (first, length) in reversed(list(enumerate(segments))):
            for event in self._segment_history(first, length, row + 1):
                yield event.within(start, besides)

    def stored_by_primal(self, event: Event) -> int:
        return event.slots

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        return (event.slots + event.residuals * self.rows) * cost.held

    def _segment_history(self, start: int, length: int, slots: int) -> Iterator[Event]:
        """The events of the reversal of a segment, whose first carry is stored."""
        again = lambda position, kept=0: Event("again", position, slots, kept)
        free, last = self.slots - slots + 1, start + length - 1
        if free == 1:
            for step in reversed(range(start, last + 1)):
                yield from map(again, range(start, step))
                yield Event("reversal", step, slots)
        elif far := self.chain.split_at(length, free):
            yield from map(again, range(start, start + far))
            yield from self._segment_history(start + far, length - far, slots + 1)
            yield from self._segment_history(start, far, slots)
        else:
            for step in range(start, last):
                yield again(step, step - start + 1)
            yield Event("reversal", last, slots, length - 1)
            for step in reversed(range(start, last)):
                yield Event("reversal", step, slots, step - start + 1)
