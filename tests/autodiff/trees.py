"""Comparing trees."""

import jax
import numpy as np


def assert_close(one, other, rtol=1e-4, atol=1e-5):
    """Two trees are of one structure, and their arrays close."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    jax.tree.map(close, one, other)
