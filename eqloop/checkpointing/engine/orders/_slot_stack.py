"""The machine that reverses a chain of blocks with a stack of slots, in place.

Each slot holds the carry at the start of a segment. The last segment is next:

    slots     0        1     2   (free)
              |        |     |       |
    chain     [--------[-----[-------]....  reversed already

1. `split`: while the last segment is long and slots are free, advance into it, and
   store the carry there: a new, shorter last segment (`_binomial.py` says where).
2. `fill`: store the carry of each block of the last segment in the free slots.
3. `pull_run`: reverse these blocks, last to first.
4. `drop`: free the slot of the segment if all of it has been reversed.

The recursion of `_binomial.py` becomes a loop in this way: what it would have on its
stack of calls is in the slots. Trip counts depend on the position, so they are dynamic.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays
from ...._types import Index, PyTree, Value
from ...steps._loop import element, store
from .._forward import iterate
from .._sweep import Cotangents, Sweep
from ..slots._slots import Carries


class Stack(NamedTuple):
    """The slots in use while a chain of blocks is reversed, a segment to each slot.

    Attributes:
        top: The last slot in use.
        start: The block at which its segment starts.
        rank: The rank of its segment, which says how it is split (`_binomial`). `None`
            if no segment has a rank above 1, as then none is split.
        starts: The starts of the segments of earlier slots.
        ranks: Their ranks, or `None`.
        carries: The carries. There is one more row than slots, for carries that are
            computed when no slot is free.
    """

    top: jax.Array
    start: jax.Array
    rank: Value
    starts: Value
    ranks: Value
    carries: Carries


@dataclasses.dataclass(frozen=True)
class Chain:
    """How a stack of slots moves along a chain of blocks.

    Attributes:
        sweep: The way back through the loop.
        last: The place of the last slot on the stack.
        reach: The `reach_table`, as an array; only segments with ranks need it.
        block: How many steps a block has.
        missing: How many steps the first block lacks.
        order: For every place on the stack, the row of its slot, and at the end the row
            that is no slot. `None` if places and rows are the same. In a while loop
            they are not: a slot that was given to a later carry keeps its row.
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
        """Reverses the blocks from `block` down to `first`."""

        def reverse_run(state: tuple[jax.Array, Stack, Cotangents]) -> PyTree:
            block, stack, cts = state
            # Loops that are never run would take memory: XLA has an array of pointers
            # for what a loop carries, and no two loops share it.
            stack = stack if stack.rank is None else self.split(stack, block)
            stack, place, low = self.fill(stack, block)
            low_here = jnp.maximum(low, first)
            cts = self.pull_run(stack.carries, place, block, low_here, cts)
            return low - 1, self.drop(stack, low), cts

        # One loop with one body, so the program does not grow with the chain.
        state = (jnp.asarray(block, jnp.int32), stack, cts)
        left = lambda state: state[0] >= first
        _, stack, cts = lax.while_loop(left, reverse_run, state)
        return stack, cts

    def position(self, block: Index) -> Index:
        """The position at which a block starts."""
        start = block * self.block - self.missing
        return jnp.maximum(start, 0) if self.missing else start

    def split(self, stack: Stack, block: Index) -> Stack:
        """Splits the last segment, which ends with `block`, until `fill` takes it."""
        # That is when its rank is 1, so that one advance over each of its blocks is
        # enough, or when no slot is free.

        def unfinished(stack: Stack) -> Value:
            return (stack.start < block) & (stack.rank > 1) & (stack.top < self.last)

        def move(stack: Stack) -> Stack:
            # `_binomial.split_at(length, free + 1, rank)`: the segment has its own slot
            # and the free ones. `stop` is where the new segment starts.
            top, start, rank, starts, ranks, carries = stack
            free = self.last - top
            length = block + 1 - start
            near = self._reach_below(free + 1, rank)
            stop = start + jnp.minimum(near, length - self._reach_below(free, rank))
            carry = carries.read(self._row(top))
            begin, end = self.position(start), self.position(stop)
            carry = self.sweep.advance_to(carry, begin, end)
            # Pascal's rule: the left part has been advanced over once, so its rank is
            # one less. The right part has the same rank, with one slot less.
            starts, ranks = store(starts, start, top), store(ranks, rank - 1, top)
            carries = carries.write(carry, self._row(top + 1))
            return Stack(top + 1, stop, rank, starts, ranks, carries)

        return lax.while_loop(unfinished, move, stack)

    def fill(self, stack: Stack, block: Index) -> tuple[Stack, jax.Array, jax.Array]:
        """Advances from the start of the last segment to the block, its last one.

        It returns the slots, the place of its carry, and the first block that has one.
        """
        # If slots are free, the carry of each block on the way goes to the next place.
        # At rank 1, there are enough slots for all but the last block, whose carry may
        # go to the row that is no slot. If none is free, all carries go to that row,
        # and only the last one is used. The carries from that of the first block to the
        # last are in the places up to the one that is returned.
        has_free = stack.top < self.last
        # With a stride of 0, every carry goes to the place after `top`. A branch would
        # copy the slots.
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
        """Reverses the blocks from `block` down to `low`, whose carries are stored."""
        # Consecutive blocks are in consecutive places.
        offset = place - block

        def pull(state: tuple[Value, Cotangents]) -> tuple[Value, Cotangents]:
            block, cts = state
            carry = carries.read(self._row(block + offset))
            position = block * self.block - self.missing
            return block - 1, self.sweep.pull(carry, position, self.block, cts)

        left = lambda state: state[0] - low + 1
        return iterate(pull, (block, cts), left, self.sweep.loop.unroll)[1]

    def drop(self, stack: Stack, low: Index) -> Stack:
        """Frees the last slot if its segment has been reversed, down to `low`."""
        done = stack.start == low
        # The first slot is never freed: `first`, not an empty stack, ends the loop.
        top = jnp.maximum(stack.top - done.astype(jnp.int32), 0)
        # Those of the slot that is then the last one.
        now = lambda own, earlier: jnp.where(done, element(earlier, top), own)
        rank = None if stack.rank is None else now(stack.rank, stack.ranks)
        start = now(stack.start, stack.starts)
        return stack._replace(top=top, start=start, rank=rank)

    def _next(self, carry: Arrays, block: Index) -> list[Value]:
        start = self.position(block)
        # The first block is shorter, so the number of steps depends on the block.
        if self.missing:
            return self.sweep.advance_to(carry, start, self.position(block + 1))
        return self.sweep.advance(carry, start, self.block)

    def _row(self, place: Index) -> Index:
        """The row of the slot at a place on the stack."""
        return place if self.order is None else element(self.order, place)

    def _reach_below(self, slots: Value, rank: Index) -> jax.Array:
        """The longest chain that can be reversed at `rank - 1`.

        The first column of the table is for rank -1, so this is column `rank`.
        """
        # As in `element`, JAX would otherwise compare both indices with zero.
        return lax.dynamic_slice(
            self.reach, (slots, rank), (1, 1), allow_negative_indices=False
        )[0, 0]
