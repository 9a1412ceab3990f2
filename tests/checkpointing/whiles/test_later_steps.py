"""While loops with short loops in their steps, and flags of their first steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._programs._equations import equations
from eqloop.checkpointing.engine._backward_step import BackwardStep
from eqloop.checkpointing.engine._forward import Active
from eqloop.checkpointing.engine._sweep import Sweep
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.rewrites._later_steps import steps_to_run
from eqloop.checkpointing.steps._loop import Loop
from eqloop.checkpointing.steps._step import make_step
from eqloop.checkpointing.whiles._until_stop import sweeps_past

from ...compiling import temp_bytes
from ...marks import slow

pytestmark = pytest.mark.sampled

STAGES, STEPS = 4, 7
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
Y = jnp.array([0.3, -0.2, 0.5])
LOOPS = {
    "checkpointed": lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=3),
    "one slot": lambda *f: el.CheckpointedWhileLoop(*f, checkpoints=1),
    "bounded": lambda *f: el.BoundedWhileLoop(*f, max_steps=STEPS + 1, base=3),
    "scan": lambda cond, body: (
        lambda init: el.ScanWhile(
            cond, lambda c, _: (body(c), None), max_steps=STEPS, schedule=el.Binomial(3)
        )(init)[0]
    ),
    "plain": lambda cond, body: (
        lambda init: lax.fori_loop(
            0,
            STEPS,
            lambda _, c: jax.tree.map(
                lambda a, b: jnp.where(cond(c), a, b), body(c), c
            ),
            init,
        )
    ),
}


def step(w, state):
    """Some stages; in the first step there is one more, which the others are given."""
    at, is_first, slope, y = state

    def stage(carry, _):
        def another(carry):
            i, slope, y = carry
            return i + 1, jnp.tanh(w @ y), y + slope / (i + 2.0)

        return lax.cond(carry[0] < STAGES, another, lambda c: c, carry), None

    start = jnp.where(is_first, 0, 1)
    first = jnp.where(is_first, 0.0, slope)
    (_, slope, y), _ = lax.scan(stage, (start, first, y), None, length=STAGES)
    return at + 1, False, slope, y


def loss(kind):
    def run(w, y, count=STEPS, flag=True):
        state = (jnp.asarray(0), jnp.asarray(flag), Y, y)
        body = lambda state: jax.tree.map(jnp.asarray, step(w, state))
        *_, slope, y = LOOPS[kind](lambda state: state[0] < count, body)(state)
        return jnp.sum(jnp.sin(slope)) + jnp.sum(y * y)

    return run


@functools.cache
def gradient(kind):
    return jax.jit(jax.value_and_grad(loss(kind), (0, 1)))


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        # An entry is a sum of terms as large as the largest of them.
        atol = 1e-6 * max(1.0, np.max(np.abs(b)))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("kind", ["checkpointed", slow("one slot"), "bounded", "scan"])
def test_gradients(kind):
    """The first step is reversed if there is one, whatever it is told."""
    for count in (0, 1, 2, STEPS):
        for flag in (True, False):
            inputs = W, Y, jnp.asarray(count), jnp.asarray(flag)
            assert_same(gradient(kind)(*inputs), gradient("plain")(*inputs))


def jvp_of_grad(f):
    return jax.jvp(jax.grad(f, (0, 1)), (W, Y), (W + 1, Y))


def grad_of_grad(f):
    return jax.grad(lambda *x: sum(map(jnp.sum, jax.grad(f, (0, 1))(*x))), (0, 1))(W, Y)


def vmap_of_grad(f):
    return jax.vmap(jax.grad(f, (0, 1)), (None, 0))(W, jnp.stack([Y, 2 * Y]))


def grad_of_vmap(f):
    """Examples of a batch that stop at their own time, one of them at once."""
    counts = jnp.array([0, 3, STEPS])
    total = lambda w, y: jnp.sum(jax.vmap(lambda n: f(w, y, n))(counts))
    return jax.grad(total, (0, 1))(W, Y)


MODES = [jvp_of_grad, slow(grad_of_grad), slow(vmap_of_grad), grad_of_vmap]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_modes(mode):
    ours, plain = (
        jax.jit(mode, static_argnums=0)(loss(k)) for k in ("checkpointed", "plain")
    )
    assert_same(ours, plain)


def sweep_of(after):
    """The way back past steps whose flag becomes this."""

    def move(consts, carry, x):
        (flag, y), (w,) = carry, consts
        y = lax.cond(flag, lambda y: w @ y, jnp.sin, y)
        return [after(flag), y], []

    carry_types = [jax.typeof(jnp.asarray(True)), jax.typeof(Y)]
    of_loop = make_step(move, [jax.typeof(W)], carry_types, [])
    active = Active((True,), (False, True), ())
    back = BackwardStep(of_loop, None, active, (), None)
    return Sweep(ByResiduals(), of_loop, Loop(3), back, [W], [], [])


def test_branches_of_later_steps_are_known():
    sweep = sweep_of(lambda flag: jnp.asarray(False))
    _, later = sweeps_past(sweep)
    for known in (later.step, later.back.step):
        names = [eqn.primitive.name for eqn in equations(known.jaxpr)]
        assert "cond" not in names
        assert "sin" in names


def test_a_flag_that_changes_is_not_known():
    first, later = sweeps_past(sweep_of(jnp.logical_not))
    assert later is first


def test_stages_are_written_out_where_later_steps_are_run():
    state = (jnp.asarray(0), jnp.asarray(True), Y, Y)

    def move(consts, carry, x):
        (w,) = consts
        after = step(w, carry[1:])
        return [carry[0], *map(jnp.asarray, after)], []

    carry_types = [jax.typeof(x) for x in (jnp.asarray(True), *state)]
    steps = steps_to_run(make_step(move, [jax.typeof(W)], carry_types, []))
    loops = [
        {eqn.primitive.name for eqn in equations(one.jaxpr)} & {"while", "scan", "cond"}
        for one in steps
    ]
    assert loops[0]
    assert not loops[1]


def test_the_initial_carry_takes_no_slot():
    """There are the slots, a row for what is not stored, and the carry itself."""

    def run(y):
        def body(state):
            at, is_first, y = state
            return at + 1, jnp.asarray(False), lax.cond(is_first, jnp.sin, jnp.tanh, y)

        loop = el.CheckpointedWhileLoop(
            lambda state: state[0] < STEPS, body, checkpoints=8, max_steps=64
        )
        return jnp.sum(loop((jnp.asarray(0), jnp.asarray(True), y))[-1] ** 2)

    small, large = (temp_bytes(jax.grad(run), jnp.ones(n)) for n in (1000, 3000))
    assert large - small == (8 + 1 + 1) * 2000 * jnp.ones(()).nbytes


def test_a_step_of_which_no_more_is_known_is_not_run_by_itself():
    first, later = steps_to_run(sweep_of(jnp.logical_not).step)
    assert later is first
