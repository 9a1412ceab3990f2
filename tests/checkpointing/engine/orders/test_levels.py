"""Nests: any length is cut without a step lost, into few levels of few segments."""

import itertools
from math import ceil, log, prod

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.checkpointing.engine.orders._levels import Nest, nests
from eqloop.checkpointing.engine.orders._nested import Nested

lengths = st.integers(1, 300) | st.integers(1, 10**6)
bases = st.integers(2, 64)
blocks = st.just(1) | st.integers(1, 40)


@hypothesis.given(lengths, bases, blocks)
@hypothesis.settings(max_examples=200)
def test_the_lengths_add_up(length, base, block):
    cut = nests(length, base, block)
    assert sum(nest.length for nest in cut) == length
    assert all(n >= 1 for nest in cut for n in nest.levels)
    assert {nest.block for nest in cut[:-1]} <= {block}
    assert cut[-1].block <= block
    assert len(cut) <= 8


def allowed(blocks: int, base: int) -> int:
    """As many carries as full levels of `base` segments would store."""
    return max(base, ceil(base * log(blocks, base))) if blocks > 1 else 1


@hypothesis.given(lengths, bases, blocks)
@hypothesis.settings(max_examples=200)
def test_few_carries_are_stored_at_once(length, base, block):
    cut = nests(length, base, block)
    left = length
    for nest in cut:
        assert Nested((nest,)).slots <= allowed(max(left // block, 1), base)
        left -= nest.length
    # The nests for the steps that the first leaves over add little to it.
    most = allowed(max(length // block, 1), base)
    assert Nested(cut).slots <= most + most // 8 + 1


@hypothesis.given(lengths, bases)
@hypothesis.settings(max_examples=200)
def test_no_step_is_advanced_over_more_often_than_there_are_levels(length, base):
    for nest in nests(length, base):
        deep = len(nest.levels) - 1
        assert Nested((nest,)).advances <= deep * nest.length
        assert deep <= max(ceil(log(length, base)) - 1, 0) if length > 1 else not deep


@pytest.mark.parametrize("base", range(2, 33))
def test_a_power_of_the_base_is_cut_as_one_would_by_hand(base):
    for depth in itertools.takewhile(lambda d: base**d <= 10**6, itertools.count(1)):
        (nest,) = nests(base**depth, base)
        assert nest.length == base**depth
        assert Nested((nest,)).slots <= base * depth
        assert len(nest.levels) <= depth


def test_sixteen_to_the_third():
    assert nests(4096, 16) == (Nest((16, 16, 16)),)


@pytest.mark.parametrize(
    ("length", "base", "levels"),
    [
        (48, 5, [(7, 6), (6,)]),
        (27279, 5, [(7, 6, 6, 4, 3, 3, 3), (7, 3, 3)]),
        (49677, 23, [(47, 12, 11, 8), (9, 5)]),
        (58025, 10, [(13, 13, 7, 7, 7), (8, 7), (2,)]),
        (61225, 7, [(8, 7, 6, 6, 6, 5), (7, 7, 5, 3), (5, 2)]),
    ],
)
def test_what_is_found_where_there_is_a_choice(length, base, levels):
    """Another choice would be right as well, and take other memory and time."""
    assert [nest.levels for nest in nests(length, base)] == levels


def test_no_more_than_one_level_where_that_will_do():
    assert nests(16, 16) == (Nest((16,)),)
    assert nests(1, 16) == (Nest((1,)),)


@pytest.mark.parametrize(
    ("length", "base", "block", "rest"),
    [(10, 16, 4, Nest((1,), 2)), (3, 16, 4, Nest((1,), 3)), (3, 16, 1, Nest((3,)))],
)
def test_what_makes_no_whole_block(length, base, block, rest):
    assert nests(length, base, block)[-1] == rest


def advances_by_hand(levels: tuple[int, ...], block: int) -> int:
    """Runs a nest: within each segment all carries but the first are advanced to."""
    if len(levels) == 1:
        return 0
    _, *inner = levels
    stride = prod(inner[1:]) * block
    filled = (inner[0] - 1) * stride
    return levels[0] * (filled + advances_by_hand(tuple(inner), block))


@hypothesis.given(st.lists(st.integers(1, 9), min_size=1, max_size=5), blocks)
def test_advances_are_those_that_fill_the_inner_levels(levels, block):
    nest = Nest(tuple(levels), block)
    assert Nested((nest,)).advances == advances_by_hand(nest.levels, block)
    assert nest.stride * levels[0] == nest.length == prod(levels) * block
