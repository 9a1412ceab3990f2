"""The arithmetic of chunks."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.mapping._chunk_loop import Chunks, equal_chunks

ROWS = st.integers(0, 3000)
AT_MOST = st.integers(1, 4000)


@hypothesis.given(ROWS, AT_MOST)
def test_chunks_cover_every_row_in_order_and_nothing_else(rows, at_most):
    chunks = equal_chunks(rows, at_most)
    starts = [min(i * chunks.size, chunks.last) for i in range(chunks.count)]
    covered = [row for start in starts for row in range(start, start + chunks.size)]
    assert set(covered) == set(range(rows))
    assert starts == sorted(set(starts))
    assert len(covered) - rows == chunks.overlap


@hypothesis.given(ROWS, AT_MOST)
def test_only_the_last_two_chunks_overlap(rows, at_most):
    chunks = equal_chunks(rows, at_most)
    assert chunks.end == chunks.last + chunks.overlap
    if chunks.count:
        assert chunks.end == (chunks.count - 1) * chunks.size
    assert 0 <= chunks.overlap < max(chunks.size, 1)


@hypothesis.given(ROWS, AT_MOST)
def test_there_are_as_few_chunks_as_can_be_and_these_as_small(rows, at_most):
    chunks = equal_chunks(rows, at_most)
    assert chunks.size <= at_most
    assert chunks.count == math.ceil(rows / at_most)
    assert (chunks.size - 1) * chunks.count < max(rows, 1)
    assert chunks.overlap <= max(chunks.count - 1, 0)


@hypothesis.given(st.integers(1000, 10**7), st.integers(100, 10**7))
def test_at_most_one_row_in_a_hundred_is_in_two_chunks(rows, at_most):
    assert 100 * equal_chunks(rows, at_most).overlap <= rows


@hypothesis.given(ROWS, AT_MOST)
def test_exact_chunks_have_each_row_once(rows, at_most):
    chunks = equal_chunks(rows, at_most, exact=True)
    assert chunks.count * chunks.size + chunks.rest == rows
    assert chunks.overlap == 0
    assert 0 <= chunks.rest < max(chunks.size, 1)
    fewest = math.ceil(rows / at_most)
    assert chunks.size <= at_most
    assert chunks.count + (chunks.rest > 0) <= fewest


@pytest.mark.parametrize(
    ("rows", "at_most", "size", "count", "overlap"),
    [
        (1000, 300, 250, 4, 0),
        (4096, 256, 256, 16, 0),
        (4597, 256, 256, 18, 11),
        (7, 3, 3, 3, 2),
        (5, 1, 1, 5, 0),
        (5, 9, 5, 1, 0),
        (0, 4, 0, 0, 0),
    ],
)
def test_examples(rows, at_most, size, count, overlap):
    chunks = equal_chunks(rows, at_most)
    assert chunks == Chunks(rows, size, count)
    assert chunks.overlap == overlap
