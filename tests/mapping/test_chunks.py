"""The arithmetic of chunks."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from eqloop.mapping._chunk_loop import Chunks, equal_chunks

ROWS = st.integers(0, 3000)
AT_MOST = st.integers(1, 4000)


@hypothesis.given(ROWS, AT_MOST)
def test_chunks_have_each_row_once(rows, at_most):
    chunks = equal_chunks(rows, at_most)
    assert chunks.count * chunks.size + chunks.rest == rows
    assert 0 <= chunks.rest < max(chunks.size, 1)
    assert chunks.size <= at_most


@hypothesis.given(ROWS, AT_MOST)
def test_there_are_as_few_as_can_be_and_these_as_small_if_there_is_a_rest(
    rows, at_most
):
    chunks, fewest = equal_chunks(rows, at_most), math.ceil(rows / at_most)
    if chunks.rest:
        assert chunks.count + 1 <= fewest
        assert (chunks.size - 1) * fewest < rows
    else:
        assert chunks.count <= max(2 * fewest - 1, 0)


@hypothesis.given(ROWS.filter(bool), AT_MOST)
def test_there_is_no_rest_if_a_size_in_the_upper_half_divides_the_rows(rows, at_most):
    chunks = equal_chunks(rows, at_most)
    size = math.ceil(rows / math.ceil(rows / at_most))
    divisors = [n for n in range(size // 2 + 1, size + 1) if rows % n == 0]
    assert chunks.size == max(divisors, default=size)
    assert (chunks.rest == 0) == bool(divisors)


@pytest.mark.parametrize(
    ("rows", "at_most", "size", "count", "rest"),
    [
        (1000, 300, 250, 4, 0),
        (4096, 256, 256, 16, 0),
        (4597, 256, 256, 17, 245),
        (1001, 300, 143, 7, 0),
        (7, 3, 3, 2, 1),
        (5, 1, 1, 5, 0),
        (5, 9, 5, 1, 0),
        (0, 4, 0, 0, 0),
    ],
)
def test_examples(rows, at_most, size, count, rest):
    assert equal_chunks(rows, at_most) == Chunks(rows, size, count, rest)


def test_chunks_of_very_many_rows_are_found_at_once():
    asked = []

    class Rows(int):
        """A number of rows that counts which sizes are tried."""

        def __mod__(self, size):
            asked.append(size)
            return int(self) % size

    assert equal_chunks(Rows(10**9), 10**8 - 1).size == 62_500_000
    assert len(asked) < 100
