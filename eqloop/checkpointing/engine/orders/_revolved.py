"""Binomial checkpointing: the fewest evaluations that the slots allow.

The arithmetic is in `_binomial.py`, and the machine that runs it in `_slot_stack.py`.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence

import jax.numpy as jnp

from ...._arrays import axes_of, vary
from ...._programs import constant
from ...._types import Index, Value
from ...steps._loop import element
from .._costs import StepCost
from .._pace import Pace
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries
from . import _binomial
from ._binomial import BlockChain
from ._order import AbstractSlotOrder, Event, block_history
from ._slot_stack import Chain, Stack


@dataclasses.dataclass(frozen=True)
class Revolved(AbstractSlotOrder):
    """A chain of blocks, reversed with the slots of the primal, which are used again.

    If the size of a block does not divide the length, the first block is shorter. It is
    reversed last, by code of its own, so that all others can share one loop.

    Trip counts depend on the position, so they are dynamic.
    """

    steps: int
    checkpoints: int
    block_size: int = 1

    @property
    def length(self) -> int:
        return self.steps

    @property
    def blocks(self) -> BlockChain:
        """The chain."""
        return BlockChain(self.steps, self.block_size)

    @property
    def slots(self) -> int:
        return min(self.checkpoints, self.blocks.count)

    @property
    def primal_slots(self) -> int:
        return self.slots

    @property
    def moves(self) -> float:
        # The carry of each block is written on the way to a run of consecutive blocks,
        # and read when the block is reversed. The way starts at a carry that is read,
        # too. With very few slots, carries that are not kept are also written, but then
        # most of the time goes into running steps again.
        return 2 * self.blocks.count + self._runs

    @property
    def _runs(self) -> float:
        """About how many runs of consecutive blocks are reversed."""
        # At least one for each segment of the primal. None is longer than the number of
        # free slots, which is half of all on average.
        return max(self.slots, self.blocks.count / (self.slots / 2 + 1))

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The segments between stored carries: their lengths in blocks, and ranks."""
        return _binomial.segments(self.blocks.count, self.checkpoints)

    @property
    def block_starts(self) -> list[int]:
        """The first block of each segment."""
        lengths = [length for length, _ in self.segments]
        return [0, *itertools.accumulate(lengths[:-1])]

    @property
    def starts(self) -> Sequence[int]:
        return [self.blocks.position(block) for block in self.block_starts]

    @property
    def advances(self) -> int:
        count, missing = self.blocks.count, self.blocks.missing
        in_blocks = _binomial.sweep_advances(count, self.checkpoints)
        if not missing:
            return in_blocks * self.block_size
        # The first block, which may be shorter, is the first of the first segment.
        length, rank = _binomial.first_segment(count, self.checkpoints)
        crossings = _binomial.crossings(length, self.slots, rank)
        return in_blocks * self.block_size - crossings * missing

    @property
    def block_sizes(self) -> Sequence[int]:
        return self.blocks.sizes

    @property
    def reach(self) -> list[list[int]]:
        """The table by which segments are split."""
        _, rank = self.segments[0]  # that of all segments
        return _binomial.reach_table(self.slots, rank, self.blocks.count + 1)

    # How it is run.

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        reach, missing = constant(self.reach), self.blocks.missing
        chain = Chain(sweep, self.slots - 1, reach, self.block_size, missing)
        # A shorter first block is left out of the chain, and reversed at the end.
        first = int(missing > 0)
        stack, last = self._stack(carries), self.blocks.count - 1
        if sweep.count is not None:
            stack, last = self._stack_until(sweep.count, reach, carries)
        stack, cts = chain.reverse(stack, last, first, cts)
        if not first:
            return cts
        return sweep.pull_first(stack.carries.read(0), self.block_size - missing, cts)

    def _stack(self, carries: Carries) -> Stack:
        """The slots as the primal leaves them, all of them in use."""
        starts, ranks = self.block_starts, [rank for _, rank in self.segments]
        numbers = (self.slots - 1, starts[-1], ranks[-1])
        top, start, rank = (jnp.asarray(number, jnp.int32) for number in numbers)
        return Stack(top, start, rank, constant(starts), constant(ranks), carries)

    def _stack_until(
        self, count: Index, reach: Value, carries: Carries
    ) -> tuple[Stack, Value]:
        """The slots after `count` steps, and the last block with any steps.

        Some of the slots may be free; `reach` is the table by which segments are split.
        """
        # As if the first block were full: then blocks begin at multiples of their size.
        steps = jnp.clip(count, 0, self.steps) + self.blocks.missing
        blocks = -(-steps // self.block_size)
        stack = self._stack(carries)
        top = jnp.maximum(jnp.sum(stack.starts < blocks) - 1, 0).astype(jnp.int32)
        start = element(stack.starts, top)
        # The first column is for rank -1. With one slot, nothing is split, and the
        # dummy table does.
        longest = element(reach, self.slots - top)[1:] if self.slots > 1 else reach[0]
        # The last segment may have ended early, and be of a lower rank. The rank is the
        # number of ranks whose reach is too short.
        rank = jnp.sum(longest < blocks - start, dtype=jnp.int32)
        # Each device may have run as many steps as it needed.
        axes = axes_of(count)
        starts, ranks = vary(stack.starts, axes), vary(stack.ranks, axes)
        return Stack(top, start, rank, starts, ranks, carries), blocks - 1

    # What it costs.

    def inner_bytes(self, cost: StepCost) -> int:
        # Each slot has a start and a rank, of four bytes each.
        return self.slots * 8

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        dynamic = self.blocks.count + self.advances
        blocks = self.blocks.count * pace.block(reversal, self.block_size)
        return (
            blocks + dynamic * pace.rate.dynamic_iteration + self._runs * pace.rate.run
        )

    @property
    def kind(self) -> Hashable:
        return "revolved", self.block_size == 1, self.blocks.missing > 0

    # How it is shown.

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        besides = slots - self.slots
        segments = list(zip(self.block_starts, self.segments, strict=True))
        for row, (first, (length, rank)) in reversed(list(enumerate(segments))):
            for event in self.chain_history(first, length, rank, row + 1):
                at, used = event.position + start, event.slots + besides
                yield event._replace(position=at, slots=used)

    def stored_by_primal(self, event: Event) -> int:
        return event.slots

    def chain_history(
        self, start: int, length: int, rank: int, slots: int
    ) -> Iterator[Event]:
        """The events of the reversal of a chain of blocks, in the order of `Chain`.

        So many `slots` are in use; the last one holds the start of the chain.
        """
        free = self.slots - slots + 1
        if length > 1 and free > 1:
            # The recursion that `Chain` runs as a loop: right part, then left part.
            far = _binomial.split_at(length, free, rank)
            yield from self.advance_history(start, start + far, slots)
            yield from self.chain_history(start + far, length - far, rank, slots + 1)
            yield from self.chain_history(start, far, rank - 1, slots)
            return
        for block in reversed(range(start, start + length)):
            yield from self.advance_history(start, block, slots)
            begin, end = self.blocks.position(block), self.blocks.position(block + 1)
            yield from block_history(begin, end - begin, slots)

    def advance_history(self, start: int, stop: int, slots: int) -> Iterator[Event]:
        begin, end = self.blocks.position(start), self.blocks.position(stop)
        for position in range(begin, end):
            yield Event("again", position, slots)
