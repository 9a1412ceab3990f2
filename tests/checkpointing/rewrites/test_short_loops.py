"""Steps with short loops written out do what they did."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqloop._programs._equations import equations
from eqloop.checkpointing.rewrites._later_steps import steps_to_run
from eqloop.checkpointing.rewrites._short_loops import (
    numbers_after,
    with_known,
    without_short_loops,
)
from eqloop.checkpointing.steps._step import make_step

pytestmark = pytest.mark.sampled

W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
Y = jnp.array([0.3, -0.2, 0.5])


def stages(w, is_first, y):
    """Five stages, of which the first one is left out but in the first step."""

    def stage(state, _):
        def another(state):
            i, y = state
            return i + 1, jnp.tanh(w @ y) * jnp.cos(i + 1.0)

        return lax.cond(state[0] < 5, another, lambda state: state, state), state[1]

    start = jnp.where(is_first, 0, 1)
    (_, y), ys = lax.scan(stage, (start, y), None, length=5)
    return [jnp.asarray(False), y], [ys]


def backwards(w, is_first, y):
    """A loop over rows, the last of them first, and one of keys."""

    def row(y, x):
        return y * x.sum() + w[0], (y, x * 2)

    _, ys = lax.scan(lambda k, _: (jax.random.split(k)[0], None), KEY, None, length=2)
    y, ys = lax.scan(row, y, w, reverse=True)
    return [is_first, y], [*ys]


KEY = jax.random.key(0)
PROGRAMS = {"stages": stages, "backwards": backwards}


def step_of(f, *inputs):
    types = [jax.typeof(jnp.asarray(x)) for x in inputs]
    return make_step(
        lambda consts, carry, x: f(*consts, *carry), types[:1], types[1:], []
    )


def names(step):
    return [eqn.primitive.name for eqn in equations(step.jaxpr)]


def vjp(f):
    """Values, tangents and cotangents; and second derivatives."""
    leaves = lambda w, y: map(jnp.asarray, jax.tree.leaves(f(w, y)))
    floats = lambda w, y: [x for x in leaves(w, y) if x.dtype != bool]
    out, pull = jax.vjp(floats, W, Y)
    total = lambda w, y: sum(jnp.sum(jnp.sin(x)) for x in floats(w, y))
    pushed = jax.jvp(jax.grad(total, (0, 1)), (W, Y), (W + 1, Y))
    return out, pull(out), jax.jvp(floats, (W, Y), (W, Y)), pushed


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_same(name, is_first):
    step = step_of(PROGRAMS[name], W, True, Y)
    plain = without_short_loops(step)
    assert "scan" in names(step)
    assert "scan" not in names(plain)
    on = lambda step: lambda w, y: step([w], [jnp.asarray(is_first), y], [])
    one, other = (jax.jit(lambda s=s: vjp(on(s)))() for s in (step, plain))
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_branches_are_taken_where_they_are_known():
    step = step_of(stages, W, True, Y)
    plain = without_short_loops(step)
    assert names(plain).count("cond") == 1
    assert numbers_after(step) == numbers_after(plain) == (0, None)
    later = with_known(plain, (0, None))
    assert names(later).count("cond") == 0
    assert names(later).count("tanh") == 4
    inputs = [W], [jnp.asarray(False), Y], []
    pairs = zip(step(*inputs)[0], later(*inputs)[0], strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-6)


def large(w, y, times):
    for _ in range(times):
        y = jnp.sin(w @ y)
    return y


KEPT = {
    "no loop": lambda w, p, y: ([p, w @ y], []),
    "many iterations": lambda w, p, y: (
        [p, lax.fori_loop(0, 17, lambda _, y: w @ y, y)],
        [],
    ),
    "many equations": lambda w, p, y: (
        [p, lax.fori_loop(0, 4, lambda _, y: large(w, y, 150), y)],
        [],
    ),
    "no iteration": lambda w, p, y: (
        [p, lax.scan(lambda y, _: (w @ y, None), y, None, length=0)[0]],
        [],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_others_are_kept(name):
    step = step_of(KEPT[name], W, True, Y)
    assert without_short_loops(step) is step


def test_stages_of_a_solver_in_a_batch_are_written_out():
    # About as many equations as a step of Diffrax's `Tsit5` has under `vmap`.
    stages = lambda w, p, y: (
        [p, lax.fori_loop(0, 7, lambda _, y: large(w, y, 38), y)],
        [],
    )
    assert "scan" not in names(without_short_loops(step_of(stages, W, True, Y)))


def test_effects_are_kept():
    def told(w, p, y):
        def row(y, x):
            jax.debug.callback(lambda: None)
            return y + x, None

        return [p, lax.scan(row, y, w)[0]], []

    step = step_of(told, W, True, Y)
    assert without_short_loops(step) is step


def test_numbers_are_known_beside_what_has_no_result():
    def told(w, is_first, y):
        jax.debug.callback(lambda y: None, y)
        y = lax.cond(is_first, jnp.sin, lambda y: y, y)
        return [jnp.asarray(False), y], []

    step = step_of(told, W, True, Y)
    assert numbers_after(step) == (0, None)
    # It has an effect, and stays as it is.
    steps = steps_to_run(step)
    assert steps.later is steps.first


def test_cotangents_of_small_consts_are_added_in_each_iteration():
    """The carry of the loop and its initial value, but not the matrix."""

    def f(w, y):
        stage = lambda slope, _: (jnp.tanh(w @ (y + slope)), None)
        return [lax.scan(stage, y * 0, None, length=4)[0]], []

    step = without_short_loops(step_of(f, W, Y))
    barriers = [
        eqn.invars[0].aval.shape
        for eqn in equations(step.jaxpr)
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert barriers == [(3,)] * 8


@pytest.mark.parametrize("which", [-2, 0, 2, 7])
def test_a_known_case_that_there_is_not_is_the_nearest_one(which):
    def select(w, i, y):
        return [i, lax.select_n(i, y, 2 * y, 3 * y)], []

    i = jnp.int32(which)
    new = with_known(step_of(select, W, i, Y), (which,))
    _, expected = select(W, i, Y)[0]
    np.testing.assert_array_equal(jex.jaxpr_as_fun(new.jaxpr)(W, i, Y)[1], expected)
