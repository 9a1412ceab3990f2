"""Bars of loops that are in a library."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from .functions import XS, W, nested, root, simulate

STEPS = len(XS)
BAR = el.ProgressBar(4, desc="a")
FORWARD, BACKWARD, TANGENTS = (
    (f"a{sweep}", STEPS) for sweep in ("", " (backward)", " (tangents)")
)
MODES = {
    "call": (lambda f: f, [FORWARD]),
    "jit": (jax.jit, [FORWARD]),
    "vmap": (lambda f: lambda w, xs: jax.vmap(f, (0, None))(w * XS[:3], xs), [FORWARD]),
    "grad": (jax.grad, [FORWARD, BACKWARD]),
    "jvp": (lambda f: lambda *args: jax.jvp(f, args, args), [TANGENTS]),
}


@pytest.mark.parametrize("schedule", [None, el.Recursive(3)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_bar_counts_each_step_once(mode, schedule, shown):
    change, bars = MODES[mode]
    f = el.Reschedule(simulate, schedule, progress=BAR)
    out = change(f)(W, XS)
    assert shown() == dict.fromkeys(bars, 1)
    plain = el.Reschedule(simulate, schedule or el.StoreAll())
    for a, b in zip(*map(jax.tree.leaves, (out, change(plain)(W, XS))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_outermost_loops_have_bars(shown):
    both = lambda w, xs: nested(w, xs) + simulate(w, xs[:8])
    jax.jit(jax.grad(el.Reschedule(both, el.Recursive(3), progress=BAR)))(W, XS)
    short = ("a", 8), ("a (backward)", 8)
    assert shown() == dict.fromkeys((FORWARD, BACKWARD, *short), 1)


@pytest.mark.parametrize("schedule", [None, el.Recursive(3)], ids=str)
def test_only_picks_the_loops_that_have_bars(schedule, shown):
    inner = lambda loop: loop.length == 4
    f = el.Reschedule(nested, schedule, progress=BAR, only=inner)
    jax.jit(jax.grad(f))(W, XS)
    assert shown() == {("a", 4): STEPS, ("a (backward)", 4): STEPS}


def test_while_loops_and_maps(shown):
    steps = int(lax.while_loop(*_counting, (jnp.float32(1), jnp.int32(0)))[1])
    jax.jit(el.Reschedule(root, progress=BAR))(jnp.float32(9))
    assert shown() == {("a", steps): 1}
    jax.jit(jax.grad(el.Reschedule(root, whiles=3, progress=BAR)))(jnp.float32(9))
    assert shown() == {("a", steps): 1, ("a (backward)", steps): 1}
    jax.jit(el.Reschedule(lambda xs: lax.map(jnp.sin, xs), progress=BAR))(XS)
    assert shown() == {FORWARD: 1}


_counting = (
    lambda carry: jnp.abs(carry[0] ** 2 - 9) > 1e-5 * 9,
    lambda carry: ((carry[0] + 9 / carry[0]) / 2, carry[1] + 1),
)


def test_a_bar_is_described_by_the_leaves_of_the_carry(recorder):
    told = []

    def desc(i: int, carry: Any, y: Any) -> str:
        told.append((i, *map(float, carry), *map(float, y)))
        return "a"

    jax.jit(el.Reschedule(simulate, progress=el.ProgressBar(12, desc=desc)))(W, XS)
    jax.effects_barrier()
    hs = [1.0]
    for x in XS:
        hs.append(float(jnp.tanh(W * hs[-1] + x)))
    np.testing.assert_allclose(
        told, [(11, hs[12], hs[11]), (23, hs[24], hs[23])], rtol=1e-5
    )
    assert len(recorder.bars) == 1
