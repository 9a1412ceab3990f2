"""Scans that end early, in steps that are only run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._programs._calculus import run, settled
from eqloop._programs._equations import equations, formula_of
from eqloop.checkpointing.engine._step import make_step
from eqloop.checkpointing.whiles._early_ends import only_run, with_early_ends

from ...marks import slow

LENGTH, W = 8, jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
Y = jnp.array([0.3, -0.2, 0.5])


def another(carry):
    at, y = carry
    return at + 1, jnp.tanh(W @ y) + at


def iterated(branch, length=LENGTH):
    """A step whose stages are some iterations of a branch."""

    def move(consts, carry, x):
        body = lambda carry, _: (branch(carry), None)
        carry, _ = lax.scan(body, tuple(carry), None, length=length)
        return list(carry), []

    return make_step(move, [], [jax.typeof(jnp.asarray(0)), jax.typeof(Y)], [])


def bounded(carry, is_idle=lambda at: at >= 5):
    return lax.cond(is_idle(carry[0]), lambda c: c, another, carry)


def in_parts(carry):
    """Two levels, as in a loop that may be long."""
    part = lambda carry: lax.scan(lambda c, _: (bounded(c), None), carry, None, 2)[0]
    return lax.cond(carry[0] < 5, part, lambda c: c, carry)


ENDING = {
    "idle at last": bounded,
    "idle at first": lambda carry: bounded(carry, lambda at: at < 20),
    "busy at first": lambda c: lax.cond(c[0] < 5, another, lambda c: c, c),
    "in parts": in_parts,
    "number": lambda c: lax.switch(
        jnp.minimum(c[0] // 5, 1), [another, lambda c: c], c
    ),
    "one leaf stays": lambda c: (
        lax.cond(c[0] < 5, lambda at: at + 1, lambda at: at, c[0]),
        c[1],
    ),
}


def names(step):
    return [eqn.primitive.name for eqn in equations(step.jaxpr)]


@pytest.mark.parametrize("branch", ENDING.values(), ids=ENDING)
def test_they_become_while_loops(branch):
    step = iterated(branch)
    ending = with_early_ends(step)
    assert {"scan", "cond"}.isdisjoint(names(ending))
    assert "while" in names(ending)
    # From 0 the loop ends early or has nothing to do, and from -9 it is cut off.
    for at in (0, 3, 5, 30, -9):
        inputs = jnp.asarray(at), Y
        expected = run(step.jaxpr, *inputs)
        for a, b in zip(run(ending.jaxpr, *inputs), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    many = jnp.arange(-9, 9), jnp.ones((18, 3))
    found, expected = (
        jax.vmap(lambda *x, s=s: run(s.jaxpr, *x))(*many) for s in (ending, step)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


OTHERS = {
    "no branch": another,
    "both change it": lambda c: lax.cond(
        c[0] < 5, another, lambda c: (c[0] + 1, c[1]), c
    ),
    "the branch is not all": lambda c: another(bounded(c)),
    "a leaf is reversed": lambda c: lax.cond(
        c[0] < 5, another, lambda c: (c[0], c[1][::-1]), c
    ),
    "three branches": lambda c: lax.switch(
        jnp.clip(c[0], 0, 2), [another, lambda c: c, lambda c: c], c
    ),
}


@pytest.mark.parametrize("branch", OTHERS.values(), ids=OTHERS)
def test_other_scans_stay(branch):
    step = iterated(branch)
    assert with_early_ends(step) is step


def test_scans_with_outputs_stay():
    def move(consts, carry, x):
        body = lambda c, x: (bounded(c), c[1] * x)
        carry, ys = lax.scan(body, tuple(carry), jnp.arange(4.0))
        return [carry[0], ys.sum(0)], []

    step = make_step(move, [], [jax.typeof(jnp.asarray(0)), jax.typeof(Y)], [])
    assert with_early_ends(step) is step


@pytest.mark.parametrize("kind", ["checkpointed", slow("scan")])
def test_no_branch_is_left_in_a_gradient(kind):
    """Where steps are run stages are a while loop, and on the way back written out."""

    def body(state):
        count, y = state
        busy = lambda c: lax.cond(c[0] < 3, another, lambda c: c, c)
        (_, y), _ = lax.scan(lambda c, _: (busy(c), None), (0, y), None, LENGTH)
        return count + 1, y

    cond = lambda state: state[0] < 4
    if kind == "checkpointed":
        loop = el.CheckpointedWhileLoop(cond, body, checkpoints=2)
    else:
        scan = el.ScanWhile(
            cond, lambda c, _: (body(c), None), max_steps=6, schedule=el.Binomial(2)
        )
        loop = lambda init: scan(init)[0]
    gradient = jax.jit(jax.grad(lambda y: loop((0, y))[1].sum()))
    assert "stablehlo.case" not in gradient.lower(Y).as_text()
    # Examples that stop apart share the stages.
    ends = lambda y: jax.vmap(lambda count: loop((count, y))[1])(jnp.arange(3)).sum()
    assert "stablehlo.case" not in jax.jit(jax.grad(ends)).lower(Y).as_text()


def test_loops_in_a_step_that_is_run_fill_no_slots():
    def move(consts, carry, x):
        body = lambda c: (c[0] + 1, jnp.sin(c[1]))
        loop = el.CheckpointedWhileLoop(lambda c: c[0] < 3, body, checkpoints=2)
        # `relu` has a derivative of its own.
        return [jax.nn.relu(loop((0, *carry))[1])], []

    def slots(step):
        loops = [formula_of(eqn) for eqn in equations(step.jaxpr)]
        return [loop.out_avals_flat[3:] for loop in loops if loop is not None]

    step = make_step(move, [], [jax.typeof(Y)], [])
    primal = step.rewritten(lambda program: settled(program, (True,), reverse=True))
    assert [len(found) > 0 for found in slots(primal)] == [True]
    assert slots(only_run(primal)) == [[]]
    for found in (primal, only_run(primal)):
        np.testing.assert_allclose(run(found.jaxpr, Y), run(step.jaxpr, Y), rtol=1e-6)
