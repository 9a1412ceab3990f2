"""The combinatorics against the recurrences, and these against an exhaustive search."""

import functools
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.checkpointing.engine.orders import _binomial

LENGTHS, SLOTS = range(1, 121), range(1, 13)


@functools.cache
def least_advances(n: int, s: int) -> int:
    """`A`: a chain of `n` steps whose start is stored, in one of the `s` slots."""
    if n <= 1 or s == 1:
        return n * (n - 1) // 2
    return min(
        m + least_advances(n - m, s - 1) + least_advances(m, s) for m in range(1, n)
    )


@functools.cache
def least_sweep_advances(n: int, s: int) -> int:
    """`P`: the primal passes all `n` steps, and leaves slots where it likes to."""
    if n == 0 or s == 1:
        return least_advances(n, 1)
    return min(
        least_sweep_advances(n - m, s - 1) + least_advances(m, s)
        for m in range(1, n + 1)
    )


@functools.cache
def least_from(stored: frozenset[int], n: int, slots: int) -> int:
    """The least advances that reverse `n` steps, by trying all that can be done."""
    if n == 0:
        return 0
    start = max(c for c in stored if c < n)
    useful = [c for c in stored if c < n - 1]
    passed = range(start + 1, n - 1)
    best = min(
        least_from(frozenset(kept), n - 1, slots)
        for kept in subsets([*useful, *passed], slots)
        if 0 in kept or n == 1
    )
    return n - 1 - start + best


def subsets(items: list[int], most: int) -> itertools.chain:
    sizes = range(min(most, len(items)) + 1)
    return itertools.chain.from_iterable(
        itertools.combinations(items, size) for size in sizes
    )


@pytest.mark.parametrize("slots", range(1, 5))
@pytest.mark.parametrize("length", range(1, 11))
def test_nothing_at_all_takes_fewer_advances(length, slots):
    only_the_start = frozenset([0])
    least = least_from(only_the_start, length, slots)
    assert _binomial.advances(length, slots) == least
    least = min(
        least_from(frozenset([0, *left]), length, slots)
        for left in subsets(list(range(1, length)), slots - 1)
    )
    assert _binomial.sweep_advances(length, slots) == least


def test_the_closed_forms_are_the_least_of_the_recurrences():
    for n, s in itertools.product(LENGTHS, SLOTS):
        assert _binomial.advances(n, s) == least_advances(n, s), (n, s)
        assert _binomial.sweep_advances(n, s) == least_sweep_advances(n, s), (n, s)


def ranks(length: int, slots: int) -> list[int]:
    """The ranks that a chain may be given: where two meet, both are good."""
    rank = _binomial.rank_of(length, slots)
    return [rank, rank + 1] if length == _binomial.reach(slots, rank) else [rank]


def test_the_split_is_the_longest_of_the_best():
    for n, s in itertools.product(LENGTHS[1:], SLOTS[1:]):
        costs = [
            m + least_advances(n - m, s - 1) + least_advances(m, s) for m in range(1, n)
        ]
        best = n - 1 - costs[::-1].index(min(costs))
        splits = [_binomial.split_at(n, s, rank) for rank in ranks(n, s) if rank > 0]
        assert max(splits) == best, (n, s)
        assert all(costs[m - 1] == min(costs) for m in splits), (n, s)


def passes(length: int, slots: int, rank: int) -> list[int]:
    """How often each step is advanced over while a chain is reversed as it is split."""
    if length == 1:
        return [0]
    if slots == 1:
        return list(range(length - 1, -1, -1))
    stop = _binomial.split_at(length, slots, rank)
    near = passes(stop, slots, rank - 1)
    return [n + 1 for n in near] + passes(length - stop, slots - 1, rank)


def test_no_step_is_advanced_over_more_often_than_the_rank():
    for n, s in itertools.product(LENGTHS, SLOTS):
        for rank in ranks(n, s):
            counts = passes(n, s, rank)
            assert sum(counts) == least_advances(n, s), (n, s)
            assert max(counts) <= rank, (n, s)
            assert counts[0] == _binomial.crossings(n, s, rank), (n, s)


def test_a_slot_a_step_needs_no_advance():
    assert _binomial.advances(7, 1) == 21
    assert _binomial.sweep_advances(7, 7) == _binomial.sweep_advances(7, 99) == 0
    assert _binomial.segments(3, 99) == [(1, 0)] * 3


long = hypothesis.given(
    length=st.integers(1, 10**6) | st.integers(1, 10**12), slots=st.integers(1, 300)
)


@long
def test_the_rank_is_the_least_that_reaches(length, slots):
    rank = _binomial.rank_of(length, slots)
    assert _binomial.reach(slots, rank) >= length
    assert _binomial.reach(slots, rank - 1) < length


@long
@hypothesis.settings(max_examples=100)
def test_segments_cannot_be_shared_out_better(length, slots):
    segments = _binomial.segments(length, slots)
    most = min(slots, length)
    assert sum(n for n, _ in segments) == length
    assert 1 <= len(segments) <= most
    assert all(n > 0 for n, _ in segments)
    for i, (n, rank) in enumerate(segments):
        free = most - i
        reach = lambda rank, free=free: _binomial.reach(free, rank)
        assert reach(rank - 1) <= n <= reach(rank)
    # The costs are convex, so it is enough that no single step is better moved.
    cost = lambda n, i: _binomial.advances(n, most - i) if n else 0
    lengths = [n for n, _ in segments] + [0] * (most - len(segments))
    saved = max(cost(n, i) - cost(n - 1, i) for i, n in enumerate(lengths) if n)
    added = min(cost(n + 1, i) - cost(n, i) for i, n in enumerate(lengths))
    assert saved <= added


@long
def test_more_slots_or_fewer_steps_never_take_more(length, slots):
    least = _binomial.sweep_advances(length, slots)
    assert _binomial.sweep_advances(length, slots + 1) <= least
    assert least <= _binomial.sweep_advances(length + 1, slots)
    assert least <= _binomial.advances(length, slots)
