"""Positions, indices and rows of a loop, in plain numbers."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from eqloop.checkpointing.steps._loop import Loop


@st.composite
def loops(draw: st.DrawFn, length: int | None = None) -> Loop:
    length = length or draw(st.integers(1, 12))
    numbers = st.none() | st.integers(-13, 13)
    step = draw(st.integers(-13, 13).filter(bool))
    kept = range(length)[draw(numbers) : draw(numbers) : step]
    return Loop(length, draw(st.booleans()), kept=kept)


@hypothesis.given(loops())
@hypothesis.settings(max_examples=100)
def test_gaps_lie_around_what_is_kept(loop):
    before, between, after = loop.gaps
    positions = sorted(loop.index(index) for index in loop.kept)
    assert positions == [before + i * (between + 1) for i in range(loop.rows)]
    assert before + max(loop.rows - 1, 0) * between + loop.rows + after == loop.length


@hypothesis.given(loops(9))
def test_rows_are_in_the_order_of_the_slice(loop):
    hypothesis.assume(loop.rows)
    rows, are_kept = loop.row(np.arange(loop.length))
    for index, row, is_kept in zip(range(loop.length), rows, are_kept, strict=True):
        assert is_kept == (index in loop.kept)
        assert 0 <= row < loop.rows
        assert not is_kept or loop.kept[int(row)] == index


@hypothesis.given(loops())
def test_the_first_that_is_kept_has_the_last_row_if_rows_descend(loop):
    hypothesis.assume(loop.rows)
    first = min(loop.kept, key=loop.index)
    assert loop.rows == 1 or loop.kept[-1 if loop.descends else 0] == first


@pytest.mark.parametrize("reverse", [False, True])
def test_all_steps_are_kept_by_default(reverse):
    loop = Loop(5, reverse)
    assert loop.rows == 5
    assert loop.gaps == (0, 0, 0)
    assert loop.row(3) == (3, True)
    assert loop.descends is reverse


def test_the_steps_of_a_block_are_all_kept():
    assert Loop(9, kept=range(0, 9, 3)).part(4).kept is None
