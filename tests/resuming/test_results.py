"""The numbers are those of the scan, whatever it is and however it is called."""

import jax
import jax.numpy as jnp
import pytest

from .cases import Example, assert_close, examples, numbers

EXAMPLES = examples()


@pytest.fixture(params=EXAMPLES)
def example(request) -> Example:
    return EXAMPLES[request.param]()


def test_is_the_scan(example, tmp_path):
    found = example.run(tmp_path)
    assert_close(found, example.expected())
    assert numbers(example.run(tmp_path)) == numbers(found)  # read from the disk


def test_gradient_is_that_of_the_scan(example, tmp_path):
    value, found = example.gradient(tmp_path)
    expected_value, expected = example.expected_gradient()
    assert_close(value, expected_value)
    if example.has_numbers:
        # A number that varies has a gradient here; Equinox takes it for a setting.
        found, expected = (found[0], found[2]), (expected[0], expected[2])
    assert_close(jax.tree.map(jnp.asarray, found), expected)
