"""Carries in two places: far slots (on the host, say), and near ones on the device.

The loop is cut into leaves. Each is reversed with the near slots alone, by the machine
of `_slot_stack.py`. The far slots hold the carries from which leaves are reached.
`_hierarchy.py` works out where the leaves are, and which carries are stored.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ...._arrays import axes_of, vary
from ...._calls import format_bytes
from ...._programs import constant
from ...._types import Index, PyTree, Value
from .._costs import StepCost
from .._loop import element, zero
from .._pace import AbstractPace
from .._sweep import Cotangents
from .._walk import Walk
from ..reversals._block_reversals import AbstractReversal
from ..slots._slots import Carries
from . import _binomial, _hierarchy
from ._binomial import BlockChain
from ._hierarchy import Leaf, Leaves
from ._order import AbstractSlotOrder, Event
from ._revolved import Revolved
from ._slot_stack import Chain, Stack


@dataclasses.dataclass(frozen=True)
class Hierarchical(AbstractSlotOrder):
    """A chain of blocks, reversed with far slots that the primal fills and near ones.

    As in `Revolved`, the first block is shorter if the size of a block does not divide
    the length, and trip counts are dynamic.

    Attributes:
        steps: How many steps the loop has.
        near: How many near slots there are.
        far: How many far slots there are, at most.
        move: How long it takes to write a carry to a far slot, or to read it from
            there, in units of an evaluation.
        block_size: How many steps a block has.
    """

    steps: int
    near: int
    far: int
    move: float
    block_size: int = 1

    @property
    def length(self) -> int:
        return self.steps

    @property
    def blocks(self) -> BlockChain:
        """The chain."""
        return BlockChain(self.steps, self.block_size)

    @property
    def leaves(self) -> Leaves:
        """The leaves; positions are in blocks."""
        move = self.move / self.block_size
        return _hierarchy.cut(self.blocks.count, self.near, self.far, move, move)

    @property
    def starts(self) -> Sequence[int]:
        return [self.blocks.position(block) for block in self.leaves.starts]

    @property
    def slots(self) -> int:
        longest = max(leaf.stop - leaf.start for leaf in self.leaves.leaves)
        return len(self.leaves.starts) + min(self.near, longest)

    @property
    def advances(self) -> int:
        return _advances(self)

    @property
    def block_sizes(self) -> Sequence[int]:
        return self.blocks.sizes

    @property
    def moves(self) -> int:
        """How many carries are written to far slots or read from them."""
        return self.leaves.writes + self.leaves.reads

    @property
    def reach(self) -> list[list[int]]:
        """The table by which the segments of a leaf are split."""
        longest = max(leaf.stop - leaf.start for leaf in self.leaves.leaves)
        rank = _binomial.rank_of(longest, self.near)
        return _binomial.reach_table(self.near, rank, longest + 1)

    # How it is run.

    def reverse(self, walk: Walk, carries: Carries, cts: Cotangents) -> Cotangents:
        missing, blocks = self.blocks.missing, self.blocks.count
        first = int(missing > 0)
        if walk.count is not None:
            steps = jnp.clip(walk.count, 0, self.steps) + missing
            blocks = -(-steps // self.block_size)
        carry = carries.read(0)
        machine = _Machine(self, walk, blocks, first)
        near = carries.slots.near.filled(carry, self.near + 1)
        _, _, cts = lax.fori_loop(
            0, len(self.leaves.leaves), machine.reverse_leaf, (carries, near, cts)
        )
        if not first:
            return cts
        # The shorter first block starts at the initial carry.
        return walk.pull_first(carry, self.block_size - missing, cts)

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        far = (len(self.leaves.starts) + 1) * cost.held if first else 0
        return far + cost.held + self.near * self.near_slot_bytes(cost)

    def near_slot_bytes(self, cost: StepCost) -> int:
        """The bytes of a near slot, which has a start and a rank besides its carry."""
        return cost.held + 8

    def reversed_in(self, pace: AbstractPace, reversal: AbstractReversal) -> float:
        leaves = self.leaves.leaves
        runs = len(leaves) + self.blocks.count / (self.near / 2 + 1)
        dynamic = self.blocks.count + self.advances
        blocks = self.blocks.count * pace.block(reversal, self.block_size)
        moves = self.moves * self.move * pace.advance
        rest = dynamic * pace.rate.dynamic_iteration + runs * pace.rate.run
        return blocks + moves + rest

    @property
    def kind(self) -> Hashable:
        return "hierarchical", self.block_size == 1, self.blocks.missing > 0

    # How it is shown.

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        far, each = len(self.leaves.starts), format_bytes(cost.held)
        (_, _), *others = super().described(cost)
        stored = f"{self.slots - far} on the device and {far} elsewhere, {each} each"
        return [("stored carries", stored), ("moves", str(self.moves)), *others]

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        besides, within = slots - len(self.leaves.starts), self.within
        for leaf in self.leaves.leaves:
            for event in self._leaf_history(leaf, within):
                moved = event.within(start, besides)
                yield moved._replace(far=event.far + besides)

    def _leaf_history(self, leaf: Leaf, within: Revolved) -> Iterator[Event]:
        """The events on the way to a leaf, and of its reversal."""
        filled = leaf.row + 1
        for begin, stop in itertools.pairwise([leaf.begin, *leaf.pushes, leaf.start]):
            for event in within.advance_history(begin, stop, filled):
                yield event._replace(far=filled)
            filled += 1
        filled = leaf.row + 1 + len(leaf.pushes)
        length = leaf.stop - leaf.start
        rank = _binomial.rank_of(length, within.slots)
        for event in within.chain_history(leaf.start, length, rank, 1):
            yield event._replace(slots=event.slots + filled, far=filled)

    def stored_by_primal(self, event: Event) -> int:
        return event.slots if event.kind == "primal" else event.far

    @property
    def within(self) -> Revolved:
        """The chain of all blocks with the near slots alone, for its history."""
        return Revolved(self.steps, self.near, self.block_size)


@functools.lru_cache(maxsize=256)
def _advances(order: Hierarchical) -> int:
    return sum(_advances_of(order, leaf) for leaf in order.leaves.leaves)


def _advances_of(order: Hierarchical, leaf: Leaf) -> int:
    """How many steps are run again on the way to a leaf and within it."""
    near, missing = order.near, order.blocks.missing
    position = order.blocks.position
    way = position(leaf.start) - position(leaf.begin)
    length = leaf.stop - leaf.start
    inside = _binomial.advances(length, near) * order.block_size
    if leaf.start or not missing:
        return way + inside
    rank = _binomial.rank_of(length, near)
    return inside - _binomial.crossings(length, near, rank) * missing


class _Way(NamedTuple):
    """A `Leaf` as a row of a table in the program, with the pushes in another table.

    Attributes:
        row: The far slot that is read.
        begin: The position of the carry in it.
        push: Where its pushes begin in the table of all pushes.
        pushes: How many pushes there are.
        start: Where the leaf starts.
        stop: Where it ends.
    """

    row: Index
    begin: Index
    push: Index
    pushes: Index
    start: Index
    stop: Index


class _Machine:
    """Reverses the leaves, one after the other.

    Attributes:
        walk: The way back.
        chain: The machine that reverses a leaf with the near slots.
        blocks: How many blocks were run.
        first: The first block that leaves reverse, 1 if block 0 is shorter.
        axes: The axes of devices along which the number of blocks may differ.
        ways: The table of leaves.
        pushes: The table of all pushes: blocks at which carries are stored on the way.
    """

    def __init__(self, order: Hierarchical, walk: Walk, blocks: Index, first: int):
        self.walk, self.blocks, self.first = walk, blocks, first
        # Each device may have run as many steps as it needed.
        self.axes = frozenset() if walk.count is None else axes_of(walk.count)
        self.reach = constant(order.reach)
        self.chain = Chain(
            walk, order.near - 1, self.reach, order.block_size, order.blocks.missing
        )
        leaves = order.leaves.leaves
        counts = [len(leaf.pushes) for leaf in leaves]
        before = [0, *itertools.accumulate(counts[:-1])]
        rows = [
            _Way(leaf.row, leaf.begin, push, count, leaf.start, leaf.stop)
            for leaf, push, count in zip(leaves, before, counts, strict=True)
        ]
        self.ways = constant(rows)
        # An empty array could not be indexed, not even by a loop without iterations.
        self.pushes = constant([p for leaf in leaves for p in leaf.pushes] or [0])

    def reverse_leaf(
        self, i: Index, state: tuple[Carries, Carries, Cotangents]
    ) -> PyTree:
        """Reverses the leaf `i`; the state has the far slots, and the near ones."""
        far, near, cts = state
        way = _Way(*element(self.ways, i))
        carry, far = self._arrive(way, far)
        near = near.write(carry, 0)
        stop = jnp.minimum(way.stop, self.blocks)
        stack = self._stack(way, stop, near)
        first = jnp.maximum(way.start, self.first)
        stack, cts = self.chain.reverse(stack, stop - 1, first, cts)
        return far, stack.carries, cts

    def _arrive(self, way: _Way, far: Carries) -> tuple[Value, Carries]:
        """Runs to the start of a leaf, and stores carries on the way.

        In a loop that ended early, blocks that were not run are not run here either:
        the position then stays where it is. Leaves beyond it have nothing to reverse.
        """

        def push(k: Value, state: tuple[Value, Value, Carries]) -> PyTree:
            block, carry, far = state
            stop = element(self.pushes, way.push + k)
            carry = self._advanced(carry, block, stop)
            # If the loop ended before this push, the slot gets the carry of an earlier
            # block. Leaves that start from it are beyond the end, and reverse nothing.
            is_run = stop < self.blocks
            block = jnp.where(is_run, stop, block)
            return block, carry, far.write(carry, way.row + 1 + k)

        state = (vary(way.begin, self.axes), far.read(way.row), far)
        block, carry, far = lax.fori_loop(0, way.pushes, push, state)
        return self._advanced(carry, block, way.start), far

    def _advanced(self, carry: PyTree, block: Index, stop: Index) -> PyTree:
        """The carry at a later block, or at this one if the later one was not run."""
        stop = jnp.where(stop < self.blocks, stop, block)
        begin, end = self.chain.position(block), self.chain.position(stop)
        return self.walk.advance_to(carry, begin, end)

    def _stack(self, way: _Way, stop: Index, near: Carries) -> Stack:
        """The near slots, the first of which has the carry at the start of the leaf."""
        # The reach with all near slots, from rank 0 on. The rank of the leaf is the
        # number of ranks whose reach is too short.
        longest = self.reach[-1, 1:]
        rank = jnp.sum(longest < stop - way.start, dtype=jnp.int32)
        places = jnp.zeros(self.chain.last + 1, jnp.int32)
        numbers = (zero(), way.start, rank, places, places)
        return Stack(*(vary(number, self.axes) for number in numbers), carries=near)
