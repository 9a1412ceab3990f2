"""The machine that reverses a chain of blocks with a stack of slots, in place.

Segments are split where `_binomial.py` says. The loops have trip counts that depend on
the position.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays
from ...._types import Index, PyTree, Value
from .._forward import iterate
from .._loop import element, store
from .._sweep import Cotangents, Sweep
from ..slots._slots import Carries


class Stack(NamedTuple):
    """The slots in use while a chain of blocks is reversed, a segment to each slot.

    Attributes:
        top: The last slot in use.
        start: The block at which its segment starts.
        rank: The rank of its segment, which says how it is split (`_binomial`).
        table: Start and rank of the segments of the slots before.
        carries: The carries. One more row takes those that find no free slot.
    """

    top: jax.Array
    start: jax.Array
    rank: jax.Array
    table: Value
    carries: Carries


@dataclasses.dataclass(frozen=True)
class Chain:
    """How a stack of slots moves along a chain of blocks.

    Attributes:
        sweep: The loop.
        last: The place of the last slot on the stack.
        reach: The table of `reach_table`, as an array.
        block: How many steps a block has.
        missing: How many steps the first block is short of that.
        order: For every place on the stack the row of its slot, and one more for the
            row beyond; `None` if places and rows are the same.
    """

    sweep: Sweep
    last: int
    reach: Value
    block: int = 1
    missing: int = 0
    order: Value = None

    def reverse(
        self, stack: Stack, block: Index, first: Value, cts: Cotangents
    ) -> tuple[Stack, Cotangents]:
        """Reverses the blocks from one down to another."""

        def reverse_run(state: tuple[jax.Array, Stack, Cotangents]) -> PyTree:
            block, stack, cts = state
            stack = self.split(stack, block)
            stack, place, low = self.fill(stack, block)
            low_here = jnp.maximum(low, first)
            cts = self.pull_run(stack.carries, place, block, low_here, cts)
            return low - 1, self.drop(stack, low), cts

        state = (jnp.asarray(block, jnp.int32), stack, cts)
        left = lambda state: state[0] >= first
        _, stack, cts = lax.while_loop(left, reverse_run, state)
        return stack, cts

    def position(self, block: Index) -> Index:
        """The position at which a block starts."""
        start = block * self.block - self.missing
        return jnp.maximum(start, 0) if self.missing else start

    def split(self, stack: Stack, block: Index) -> Stack:
        """Stores the carries that start new segments before the block.

        Ends with a segment that is reversed with one advance over each of its blocks,
        or without a free slot.
        """

        def unfinished(stack: Stack) -> Value:
            return (stack.start < block) & (stack.rank > 1) & (stack.top < self.last)

        def move(stack: Stack) -> Stack:
            top, start, rank, table, carries = stack
            free = self.last - top
            length = block + 1 - start
            near = self._reach_below(free + 1, rank)
            stop = start + jnp.minimum(near, length - self._reach_below(free, rank))
            carry = carries.read(self._row(top))
            begin, end = self.position(start), self.position(stop)
            carry = self.sweep.advance_to(carry, begin, end)
            table = store(table, jnp.stack([start, rank - 1]), top)
            carries = carries.write(carry, self._row(top + 1))
            return Stack(top + 1, stop, rank, table, carries)

        return lax.while_loop(unfinished, move, stack)

    def fill(self, stack: Stack, block: Index) -> tuple[Stack, jax.Array, jax.Array]:
        """Advances to the block and stores all carries on the way, if slots are free.

        If none is, they all go to the place beyond the last slot. So does the carry of
        the block itself when those before it have taken the slots.

        Returns:
            The slots, the place of the block's carry, and the first block whose carry
            lies there as well, with those in between in the places in between.
        """
        has_free = stack.top < self.last
        stride = jnp.where(has_free, 1, 0)

        def move(state: tuple[Value, list[Value], Carries]) -> PyTree:
            at, carry, carries = state
            place = stack.top + 1 + stride * (at - stack.start)
            carry = self._next(carry, at)
            return at + 1, carry, carries.write(carry, self._row(place))

        carry = stack.carries.read(self._row(stack.top))
        state = (stack.start, carry, stack.carries)
        *_, carries = lax.while_loop(lambda state: state[0] < block, move, state)
        count = block - stack.start
        place = stack.top + jnp.where(has_free, count, jnp.minimum(count, 1))
        low = jnp.where(has_free, stack.start, block)
        return stack._replace(carries=carries), place, low

    def pull_run(
        self, carries: Carries, place: Index, block: Index, low: Index, cts: Cotangents
    ) -> Cotangents:
        """Reverses the blocks from one down to another, whose carries are at hand."""
        offset = place - block

        def pull(state: tuple[Value, Cotangents]) -> tuple[Value, Cotangents]:
            block, cts = state
            carry = carries.read(self._row(block + offset))
            position = block * self.block - self.missing
            return block - 1, self.sweep.pull(carry, position, self.block, cts)

        left = lambda state: state[0] - low + 1
        return iterate(pull, (block, cts), left, self.sweep.loop.unroll)[1]

    def drop(self, stack: Stack, low: Index) -> Stack:
        """Frees the slot whose segment has been reversed, if it has been wholly."""
        done = stack.start == low
        top = jnp.maximum(stack.top - done.astype(jnp.int32), 0)
        start, rank = element(stack.table, top)
        start = jnp.where(done, start, stack.start)
        rank = jnp.where(done, rank, stack.rank)
        return Stack(top, start, rank, stack.table, stack.carries)

    def _next(self, carry: Arrays, block: Index) -> list[Value]:
        """The carry after a block."""
        start = self.position(block)
        if self.missing:
            return self.sweep.advance_to(carry, start, self.position(block + 1))
        return self.sweep.advance(carry, start, self.block)

    def _row(self, place: Index) -> Index:
        """The row of the slot at a place on the stack."""
        return place if self.order is None else element(self.order, place)

    def _reach_below(self, slots: Value, rank: Index) -> jax.Array:
        """The longest chain that is reversed at the rank below."""
        return lax.dynamic_slice(
            self.reach, (slots, rank), (1, 1), allow_negative_indices=False
        )[0, 0]
