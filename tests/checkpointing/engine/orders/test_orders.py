"""What an order says of itself, against a walk through it step by step."""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.checkpointing.engine.orders import _binomial
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._levels import Nest, nests
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved


@dataclasses.dataclass
class Walker:
    """Reverses a chain by hand; minds how far it advances and what it stores."""

    advances: int = 0
    stored: int = 0
    most: int = 0
    reversed: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def store(self, count: int = 1) -> None:
        self.stored += count
        self.most = max(self.most, self.stored)

    def free(self, count: int = 1) -> None:
        self.stored -= count

    def nest(self, nest: Nest, start: int) -> None:
        """Its outermost carries are stored already, and are freed in the end."""
        count, *inner = nest.levels
        for segment in reversed(range(count)):
            position = start + segment * nest.stride
            if not inner:
                self.reversed.append((position, nest.block))
                continue
            within = dataclasses.replace(nest, levels=tuple(inner))
            self.store(inner[0])
            self.advances += (inner[0] - 1) * within.stride
            self.nest(within, position)
        self.free(count)

    def chain(self, order: Revolved, begin: int, end: int, slots: int) -> None:
        """Some blocks; the carry before them is stored, and freed in the end."""
        starts = [order.blocks.position(b) for b in range(end)]
        starts.append(
            order.length if end == order.blocks.count else self.reversed[-1][0]
        )
        if end - begin == 1:
            self.reversed.append((starts[begin], starts[end] - starts[begin]))
        elif slots == 1:
            for block in reversed(range(begin, end)):
                self.advances += starts[block] - starts[begin]
                self.reversed.append((starts[block], starts[block + 1] - starts[block]))
        else:
            rank = _binomial.rank_of(end - begin, slots)
            middle = begin + _binomial.split_at(end - begin, slots, rank)
            self.advances += starts[middle] - starts[begin]
            self.store()
            self.chain(order, middle, end, slots - 1)
            self.chain(order, begin, middle, slots)
            return
        self.free()


def walk_nests(order: Nested) -> Walker:
    walker = Walker()
    walker.store(len(order.starts))
    start = order.length
    for nest in reversed(order.nests):
        start -= nest.length
        walker.nest(nest, start)
    return walker


def walk_chain(order: Revolved) -> Walker:
    walker = Walker()
    walker.store(len(order.starts))
    ends = [*order.block_starts[1:], order.blocks.count]
    cuts = list(zip(order.block_starts, ends, strict=True))
    for taken, (begin, end) in reversed(list(enumerate(cuts))):
        free = order.slots - taken
        walker.chain(order, begin, end, free)
    return walker


def assert_reverses_every_step(walker: Walker, length: int) -> None:
    """In consecutive blocks, the last step first, and then nothing is stored."""
    ends = [length, *(start for start, _ in walker.reversed)]
    assert [start + count for start, count in walker.reversed] == ends[:-1]
    assert ends[-1] == 0
    assert walker.stored == 0


@hypothesis.given(st.integers(1, 400), st.integers(2, 20), st.integers(1, 8))
@hypothesis.settings(max_examples=100)
def test_nests(length, base, block):
    order = Nested(nests(length, base, block))
    walker = walk_nests(order)
    assert_reverses_every_step(walker, length)
    assert order.length == length
    assert order.advances == walker.advances
    assert order.evaluations == 2 * length + walker.advances
    assert order.slots == walker.most
    assert order.block == max(count for _, count in walker.reversed)


@hypothesis.given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 250))
@hypothesis.settings(max_examples=200)
def test_a_chain_of_blocks(length, slots, block):
    order = Revolved(length, slots, block)
    walker = walk_chain(order)
    assert_reverses_every_step(walker, length)
    assert order.advances == walker.advances
    assert order.evaluations == 2 * length + walker.advances
    assert walker.most <= slots
    sizes = {count for _, count in walker.reversed[:-1]}
    assert sizes <= {block}
    assert walker.reversed[-1][1] == block - order.blocks.missing


@pytest.mark.parametrize("slots", range(1, 13))
def test_a_chain_of_single_steps_takes_the_least_evaluations(slots):
    for length in range(1, 121):
        order = Revolved(length, slots)
        least = _binomial.sweep_advances(length, slots)
        assert order.evaluations == 2 * length + least


@hypothesis.given(st.integers(1, 5000), st.integers(1, 60), st.integers(1, 300))
def test_starts_are_where_the_blocks_start(length, slots, block):
    order = Revolved(length, slots, block)
    assert order.starts[0] == order.block_starts[0] == 0
    assert len(order.starts) == order.slots <= slots
    ends = [*order.starts[1:], length]
    segments = [(b - a) for a, b in zip(order.starts, ends, strict=True)]
    assert all(n > 0 for n in segments)
    blocks = [n for n, _ in order.segments]
    assert segments == [blocks[0] * block - order.blocks.missing] + [
        n * block for n in blocks[1:]
    ]
    assert all(a < b for a, b in itertools.pairwise(order.block_starts))


def test_what_stores_all_runs_nothing_again():
    order = AllAtOnce(7)
    assert (order.evaluations, order.slots) == (7, 0)
    assert order.block == 7
