"""The search for the largest chunks that fit, on memory that is no straight line."""

import hypothesis
from hypothesis import strategies as st

from eqloop.mapping._chunk_loop import equal_chunks
from eqloop.mapping._fitting import largest_that_fits


@st.composite
def searches(draw):
    """A length, a limit, and what chunks of each size take: more for more rows."""
    length, base = draw(st.integers(1, 5000)), draw(st.integers(0, 10**4))
    per_row, bend = draw(st.integers(0, 10**3)), draw(st.floats(0.3, 2.0))
    bytes_of = lambda size: base + int(per_row * size**bend)
    return length, draw(st.integers(1, 2 * bytes_of(length) + 1)), bytes_of


@hypothesis.given(searches())
@hypothesis.settings(max_examples=200)
def test_what_is_found_fits_and_the_next_size_would_not_or_it_is_nearly_full(search):
    length, limit, bytes_of = search
    tried = []

    def counting(size):
        assert size == equal_chunks(length, size).size
        tried.append(size)
        return bytes_of(size)

    size, used = largest_that_fits(length, limit, counting)
    assert len(set(tried)) == len(tried) <= 30
    if size == 0:
        assert used == bytes_of(1) > limit
        return
    assert used == bytes_of(size) <= limit
    larger = range(size + 1, length + 1)
    larger = [s for s in larger if equal_chunks(length, s).size == s]
    assert not larger or used >= 0.5 * limit or bytes_of(larger[0]) > limit


def test_few_programs_are_compiled():
    tried = []

    def bytes_of(size):
        tried.append(size)
        return 3000 + 8192 * size

    assert largest_that_fits(10**6, 2**29, bytes_of)[0] * 8192 > 2**28
    assert len(tried) == 2


def test_a_guess_that_a_line_has_somewhat_too_large_fits_at_once():
    tried = []

    def bytes_of(size):
        tried.append(size)
        return int(100 * size**0.95)

    size, used = largest_that_fits(509, 3200, bytes_of)
    assert tried == [509, size]
    assert 1600 <= used <= 3200


def test_half_of_the_limit_is_enough():
    tried = []

    def bytes_of(size):
        tried.append(size)
        return 120 * size if size < 512 else 100 * size

    assert largest_that_fits(512, 3200, bytes_of)[0] == tried[-1]
    assert len(tried) == 2


def test_a_jump_is_found_without_trying_every_size():
    tried = []

    def bytes_of(size):
        tried.append(size)
        return 160 if size < 300 else 7000 * size

    assert largest_that_fits(2001, 9604, bytes_of) == (286, 160)
    assert len(tried) <= 15


def test_everything_fits():
    assert largest_that_fits(1000, 100, lambda size: 7) == (1000, 7)
