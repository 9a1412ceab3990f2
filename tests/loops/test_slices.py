"""Which outputs a slice keeps, against slicing a list."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from eqloop.loops._open_loop import kept_indices
from eqloop.loops._sliced_scan import as_index

numbers = st.none() | st.integers(-15, 15)
slices = st.builds(slice, numbers, numbers, numbers.filter(lambda step: step != 0))


@hypothesis.given(st.integers(0, 12), slices)
@hypothesis.settings(max_examples=300)
def test_indices_are_those_of_a_list(length, kept):
    indices = kept_indices(length, kept)
    expected = list(range(length))[kept]
    assert (list(range(length)) if indices is None else list(indices)) == expected
    assert (indices is None) == (expected == list(range(length)))


def test_no_slice_keeps_everything():
    assert kept_indices(3, None) is None


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3)])
def test_indices_of_all_kinds(value):
    index = as_index("SlicedScan", "start", value)
    assert index == 3
    assert type(index) is int
