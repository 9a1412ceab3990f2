"""Carries in two places: the cuts against the recurrences, and these against a search.

The search tries all that can be done with carries in two places, which is more than the
recurrences allow.
"""

import functools
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.checkpointing.engine.orders import _binomial, _hierarchy
from eqloop.checkpointing.engine.orders._hierarchical import Hierarchical

LENGTHS = (1, 2, 3, 7, 20, 45)
MOVES = ((0, 0), (1, 1), (0.5, 3), (20, 5.5))


class Least:
    """H-Revolve's recurrences, written down once more."""

    def __init__(self, near, write, read):
        self.near, self.write, self.read = near, write, read
        self.stored = functools.cache(self._stored)
        self.primal = functools.cache(self._primal)

    def _stored(self, n, slots):
        """`P`: the first carry is in one of the far slots."""
        first = _binomial.advances(n, self.near)
        cuts = (
            j + self.at_hand(n - j, slots - 1) + self.read + self.stored(j, slots)
            for j in range(1, n)
        )
        return min([first, *cuts])

    def at_hand(self, n, slots):
        """`O`: the first carry is at hand, and may be stored."""
        least = _binomial.advances(n, self.near)
        return min(least, self.write + self.stored(n, slots)) if slots else least

    def _primal(self, n, slots):
        """`S`: the primal passes all steps, and leaves as many carries as it likes."""
        if not n:
            return 0
        moves = self.write + self.read
        return min(
            (
                moves + self.stored(j, slots) + self.primal(n - j, slots - 1)
                for j in range(1, n + 1)
                if slots
            ),
            default=float("inf"),
        )


class Anything:
    """The least cost of all, whatever is kept in either place, and for how long."""

    def __init__(self, near, far, write, read):
        self.near, self.far, self.write, self.read = near, far, write, read
        self.back = functools.cache(self._back)

    def least(self, n):
        """The primal leaves any carries in far slots, the first one among them."""
        return min(
            len(kept) * self.write + self.back(n, frozenset(), frozenset(kept))
            for kept in subsets(range(n), self.far)
            if 0 in kept
        )

    def _back(self, n, near, far):
        """Steps before `n` are left; the last of them is reversed next."""
        if not n:
            return 0
        near, far = (frozenset(c for c in group if c < n) for group in (near, far))
        return min(
            self._from(start, n, near, far) + (0 if start in near else self.read)
            for start in near | far
        )

    def _from(self, start, n, near, far):
        """The last step is reached from a carry, and carries on the way are kept."""
        passed, best = range(start, n), float("inf")
        for kept_near in subsets({*near, *passed}, self.near):
            for kept_far in subsets({*far, *passed}, self.far):
                if 0 not in kept_far:
                    continue
                written = len(set(kept_far) - far) * self.write
                rest = self.back(n - 1, frozenset(kept_near), frozenset(kept_far))
                best = min(best, n - 1 - start + written + rest)
        return best


def subsets(items, most):
    sizes = range(min(most, len(items)) + 1)
    return itertools.chain.from_iterable(
        itertools.combinations(sorted(items), size) for size in sizes
    )


@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("near", [1, 2, 6])
def test_cuts_cost_the_least_of_the_recurrences(near, moves):
    least = Least(near, *moves)
    for length, far in itertools.product(LENGTHS, (1, 2, 5, 40)):
        found = _hierarchy.cut(length, near, far, *moves).cost(near, *moves)
        assert found == pytest.approx(least.primal(length, far)), (length, far)


@pytest.mark.parametrize("moves", [(0, 0), (1, 1), (0.5, 3)])
def test_nothing_at_all_takes_less(moves):
    for length, near, far in itertools.product((2, 4, 6), (1, 2), (1, 2)):
        found = _hierarchy.cut(length, near, far, *moves).cost(near, *moves)
        assert found == Anything(near, far, *moves).least(length)


@pytest.mark.parametrize("far", [4, 16, 64, 300])
@pytest.mark.parametrize("near", [2, 8])
def test_long_chains_cost_hardly_more_than_the_least(monkeypatch, near, far):
    """Of all that a gradient does: the primal, reversals of twice a step, and these."""
    moves = 0.5, 0.5
    for length in (200, 400):
        found = _hierarchy.cut(length, near, far, *moves).cost(near, *moves)
        with monkeypatch.context() as patch:
            patch.setattr(_hierarchy, "_MOST_ENTRIES", 2**30)
            whole = _hierarchy._by_tables(length, near, far, *moves)
        least = whole.cost(near, *moves)
        assert least <= found + 1e-9
        assert found + 3 * length <= 1.04 * (least + 3 * length)


def test_as_many_far_slots_as_leaves():
    """Equal leaves, as is best where nothing is stored twice."""
    found = _hierarchy.cut(100_000, 10, 20_000, 2.0, 2.0)
    assert found.writes == found.reads == len(found.starts)
    assert found.cost(10, 2, 2) < 1.28 * 100_000


cuts = st.tuples(
    st.integers(1, 400),
    st.integers(1, 12),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.3, 2.0, 15.0]),
    st.integers(1, 7),
)


@hypothesis.given(cuts)
@hypothesis.settings(max_examples=60, deadline=None)
def test_leaves_are_reached_by_carries_that_are_there(settings):
    length, near, far, move, _ = settings
    found = _hierarchy.cut(length, near, far, move, move)
    rows, end = dict(enumerate(found.starts)), length
    assert found.starts[0] == 0
    for leaf in found.leaves:
        assert rows[leaf.row] == leaf.begin
        assert leaf.stop == end
        end, on_the_way = leaf.start, [leaf.begin, *leaf.pushes, leaf.start]
        assert on_the_way == sorted(on_the_way)
        rows |= {leaf.row + 1 + i: at for i, at in enumerate(leaf.pushes)}
        # The slots are those that the primal has filled.
        assert max(rows) < len(found.starts) <= far
    assert end == 0


@hypothesis.given(cuts)
@hypothesis.settings(max_examples=60, deadline=None)
def test_what_is_counted_is_what_is_done(settings):
    order = Hierarchical(*settings)
    events = list(order.history())
    again = [event for event in events if event.kind == "again"]
    # Before a block of several steps is reversed, its residuals are stored.
    inner = [event for event in again if event.residuals]
    assert len(again) - len(inner) == order.advances
    reverse = [event.position for event in events if event.kind == "reversal"]
    assert reverse == list(reversed(range(order.length)))
    assert max(event.slots for event in events) <= order.slots
    assert order.starts[0] == 0
    assert sum(order.block_sizes) >= order.block


def test_with_one_block_size_it_is_the_same_in_blocks():
    whole, blocks = Hierarchical(120, 3, 5, 0.7), Hierarchical(600, 3, 5, 3.5, 5)
    assert blocks.starts == [5 * start for start in whole.starts]
    assert blocks.advances == 5 * whole.advances
    assert blocks.moves == whole.moves
