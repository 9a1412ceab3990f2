"""Comparing trees, and compiling for a test: how good the code is does not matter."""

import functools

import jax
import numpy as np

quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


def assert_close(one, other, rtol=1e-4, atol=1e-5):
    """Two trees are of one structure, and their arrays close."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    jax.tree.map(close, one, other)
