"""The reverse sweep of binomial checkpointing, with dynamic trip counts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..._lists import Arrays
from . import _binomial
from ._constant import constant
from ._forward import iterate, zero
from ._layout import Revolved
from ._loop import element, store
from ._slots import read, write
from ._sweep import Cotangents, Sweep


class _Stack(NamedTuple):
    """The slots in use while a chain of blocks is reversed, a segment to each slot.

    Attributes:
        top: The last slot in use.
        start: The block at which its segment starts.
        rank: The rank of its segment, which says how it is split (`_binomial`).
        table: Start and rank of the segments of the slots before.
        slots: The carries. One more row takes those that find no free slot.
    """

    top: Any
    start: Any
    rank: Any
    table: Any
    slots: list[Any]


def reverse_chain(
    sweep: Sweep, layout: Revolved, slots: Arrays, cts: Cotangents
) -> Cotangents:
    """Reverses a chain of blocks, last to first, with a stack of slots in place."""
    chain = _Chain(sweep, layout)
    # The first block may be shorter. It is the last to be reversed, by itself.
    first = int(layout.missing > 0)

    def reverse_run(state: tuple[Any, _Stack, Cotangents]) -> Any:
        block, stack, cts = state
        stack = chain.split(stack, block)
        stack, row, low = chain.fill(stack, block)
        cts = chain.pull_run(stack.slots, row, block, jnp.maximum(low, first), cts)
        return low - 1, chain.drop(stack, low), cts

    state = (jnp.asarray(layout.blocks - 1, jnp.int32), chain.stack(slots), cts)
    _, stack, cts = lax.while_loop(lambda state: state[0] >= first, reverse_run, state)
    if first:
        carry = read(stack.slots, 0)
        cts = sweep.pull(carry, zero(), layout.block - layout.missing, cts)
    return cts


class _Chain:
    """How the stack of slots moves along a chain of blocks."""

    def __init__(self, sweep: Sweep, layout: Revolved):
        self.sweep = sweep
        self.layout = layout
        self.last = layout.primal_slots - 1
        ranks = max(rank for _, rank in layout.segments) + 1
        limit = layout.blocks + 1
        # reach[k, r + 1] is the longest chain of k slots at rank r, cut to fit.
        reach = [
            [min(_binomial.reach(k, r), limit) for r in range(-1, ranks)]
            for k in range(layout.primal_slots + 1)
        ]
        # With a single slot nothing is ever split, and the table would be long.
        self.reach = constant(reach if self.last else [[0]])

    def position(self, block: Any) -> Any:
        """The position at which a block starts."""
        start = block * self.layout.block - self.layout.missing
        return jnp.maximum(start, 0) if self.layout.missing else start

    def stack(self, slots: Arrays) -> _Stack:
        """As the primal leaves it, with all slots in use."""
        ranks = [rank for _, rank in self.layout.segments]
        rows = list(zip(self.layout.block_starts, ranks, strict=True))
        top, start, rank = (
            jnp.asarray(number, jnp.int32) for number in (self.last, *rows[-1])
        )
        return _Stack(top, start, rank, constant(rows), list(slots))

    def split(self, stack: _Stack, block: Any) -> _Stack:
        """Stores the carries that start new segments before the block.

        Ends with a segment that is reversed with one advance over each of its blocks,
        or without a free slot.
        """

        def unfinished(stack: _Stack) -> Any:
            return (stack.start < block) & (stack.rank > 1) & (stack.top < self.last)

        def move(stack: _Stack) -> _Stack:
            top, start, rank, table, slots = stack
            free = self.last - top
            length = block + 1 - start
            near = self._reach_below(free + 1, rank)
            stop = start + jnp.minimum(near, length - self._reach_below(free, rank))
            carry = read(slots, top)
            begin, end = self.position(start), self.position(stop)
            carry = self.sweep.walk.advance_to(carry, begin, end)
            table = store(table, jnp.stack([start, rank - 1]), top)
            slots = write(slots, carry, top + 1)
            return _Stack(top + 1, stop, rank, table, slots)

        return lax.while_loop(unfinished, move, stack)

    def fill(self, stack: _Stack, block: Any) -> tuple[_Stack, Any, Any]:
        """Advances to the block and stores all carries on the way, if slots are free.

        If none is, they all go to the row beyond the last slot. So does the carry of
        the block itself when those before it have taken the slots.

        Returns:
            The slots, the row of the block's carry, and the first block whose carry
            lies there as well, with those in between in the rows in between.
        """
        has_free = stack.top < self.last
        stride = jnp.where(has_free, 1, 0)

        def move(state: tuple[Any, list[Any], list[Any]]) -> Any:
            at, carry, slots = state
            row = stack.top + 1 + stride * (at - stack.start)
            carry = self._next(carry, at)
            return (
                at + 1,
                carry,
                write(slots, carry, row),
            )

        carry = read(stack.slots, stack.top)
        state = (stack.start, carry, stack.slots)
        *_, slots = lax.while_loop(lambda state: state[0] < block, move, state)
        count = block - stack.start
        row = stack.top + jnp.where(has_free, count, jnp.minimum(count, 1))
        low = jnp.where(has_free, stack.start, block)
        return stack._replace(slots=slots), row, low

    def pull_run(
        self, slots: Arrays, row: Any, block: Any, low: Any, cts: Cotangents
    ) -> Cotangents:
        """Reverses the blocks from one down to another; their carries lie in a row."""
        offset = row - block

        def pull(state: tuple[Any, Cotangents]) -> tuple[Any, Cotangents]:
            block, cts = state
            carry = read(slots, block + offset)
            position = block * self.layout.block - self.layout.missing
            return block - 1, self.sweep.pull(carry, position, self.layout.block, cts)

        left = lambda state: state[0] - low + 1
        return iterate(pull, (block, cts), left, self.sweep.loop.unroll)[1]

    def drop(self, stack: _Stack, low: Any) -> _Stack:
        """Frees the slot whose segment has been reversed, if it has been wholly."""
        done = stack.start == low
        top = jnp.maximum(stack.top - done, 0)
        start, rank = element(stack.table, top)
        start = jnp.where(done, start, stack.start)
        rank = jnp.where(done, rank, stack.rank)
        return _Stack(top, start, rank, stack.table, stack.slots)

    def _next(self, carry: Arrays, block: Any) -> list[Any]:
        """The carry after a block."""
        start = self.position(block)
        if self.layout.missing:
            return self.sweep.walk.advance_to(carry, start, self.position(block + 1))
        return self.sweep.walk.advance(carry, start, self.layout.block)

    def _reach_below(self, slots: Any, rank: Any) -> Any:
        """The longest chain that is reversed at the rank below."""
        return lax.dynamic_slice(
            self.reach, (slots, rank), (1, 1), allow_negative_indices=False
        )[0, 0]
