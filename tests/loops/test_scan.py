"""The scans against `jax.lax.scan`: the same numbers, in every mode."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..compiling import AS_USED
from .random_scans import assert_agrees_with_lax_scan, calls
from .trees import INEXACT, array


@hypothesis.given(calls())
@hypothesis.settings(max_examples=3)
def test_agrees_with_lax_scan(call):
    assert_agrees_with_lax_scan(call)


@pytest.mark.slow
@hypothesis.given(calls())
@hypothesis.settings(max_examples=500)
def test_agrees_with_lax_scan_in_many_cases(call):
    assert_agrees_with_lax_scan(call)


@pytest.mark.parametrize("dtype", INEXACT, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_primal_has_the_bits_of_lax_scan(dtype, reverse):
    xs = array((37, 3), dtype, 0)
    f = lambda h, x: (jnp.sin(h) + x, h * x)
    init = jnp.zeros(3, dtype)
    ours = el.CheckpointedScan(f, base=3, reverse=reverse)
    theirs = functools.partial(jax.lax.scan, f, reverse=reverse)
    actual, expected = (
        jax.jit(loop, compiler_options=AS_USED)(init, xs) for loop in (ours, theirs)
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def test_the_plan_of_chunks():
    scan = el.Scan(lambda h, x: (jnp.sin(h) + x, h), schedule=el.Chunked(4))
    plan = scan.plan(0.5, jnp.ones(10))
    # Two chunks of four, and one of the two steps that are left over.
    assert plan.levels == ((2, 4), (2,))
    assert plan.evaluations == 10 + 10 + 2 * 3
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, not 0"):
        el.Chunked(0)


def test_a_gradient_outside_of_jit_keeps_no_copy_of_xs():
    step = lambda h, x: (x * h, h)
    xs = jnp.ones((8, 3))
    for loop in (el.Scan(step), lambda h, xs: jax.lax.scan(step, h, xs)):
        _, back = jax.vjp(lambda xs, loop=loop: loop(jnp.ones(3), xs), xs)
        assert any(leaf is xs for leaf in jax.tree.leaves(back.args_res))
