"""How often a while loop evaluates its body, counted while it runs."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from .models import Ours, Theirs

pytestmark = pytest.mark.sampled


def evaluations(loop):
    """From a number of steps to how often a gradient evaluates the body."""
    count = 0

    def tick():
        nonlocal count
        count += 1

    def body(carry):
        jax.debug.callback(tick)
        return carry[0] + 1, jnp.sin(carry[1])

    @jax.jit
    def gradient(n):
        cond = lambda carry: carry[0] < n
        return jax.grad(lambda x: loop(cond, body, (0, x))[1])(0.5)

    def evaluate(n):
        nonlocal count
        jax.effects_barrier()
        count = 0
        gradient(n).block_until_ready()
        jax.effects_barrier()
        return count

    return evaluate


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_checkpointed(slots):
    def ours(cond, body, init):
        return el.CheckpointedWhileLoop(cond, body, checkpoints=slots)(init)

    def theirs(cond, body, init):
        return eqxi.while_loop(
            cond, body, init, checkpoints=slots, kind="checkpointed", max_steps=None
        )

    count_ours, count_theirs = evaluations(ours), evaluations(theirs)
    models = Ours(slots), Theirs(slots)
    lengths = [1, 2, 3, slots + 1, 37] if slots > 1 else [1, 2, 9]
    for n in range(1, max(lengths) + 1):
        for model in models:
            model.pass_step(n - 1)
        if n in lengths:
            one, other = (2 * n + model.advances(n) for model in models)
            assert count_ours(n) == one
            assert count_theirs(n) == other
            assert one <= other


@pytest.mark.parametrize(("max_steps", "loops"), [(3, 4), (9, 4), (10, 8)])
def test_short_loops_split_no_segments(max_steps, loops):
    """With 3 slots, no segment of up to 9 steps has to be split on the way back.

    Then the forward pass is a single loop, and the way back has loops over segments,
    over the steps that are run again, and over those that are reversed.
    """

    def gradient(x, n):
        loop = el.CheckpointedWhileLoop(
            lambda carry: carry[0] < n,
            lambda carry: (carry[0] + 1, jnp.sin(carry[1])),
            checkpoints=3,
            max_steps=max_steps,
        )
        return jax.grad(lambda x: loop((0, x))[1])(x)

    program = jax.jit(gradient).lower(0.5, 7).as_text()
    assert program.count("stablehlo.while") == loops


def test_bounded():
    """Each level but the outermost runs all but the last of its segments again."""
    count = evaluations(
        lambda cond, body, init: el.BoundedWhileLoop(cond, body, max_steps=64, base=4)(
            init
        )
    )
    for n in (0, 1, 2, 5, 16, 17, 40, 64):
        of_16 = [min(16, n - start) for start in range(0, n, 16)]
        of_4 = [min(4, n - start) for start in range(0, n, 4)]
        again = sum((steps - 1) // 4 * 4 for steps in of_16) + sum(of_4) - len(of_4)
        assert count(n) == 2 * n + again
    assert count(64) < 4 * 64


@pytest.mark.parametrize("kind", ["while", "bounded", "checkpointed"])
def test_primal_runs_each_step_once(kind):
    ran = []

    def body(carry):
        jax.debug.callback(ran.append, carry)
        return carry + 1

    loops = {
        "while": el.WhileLoop(lambda c: c < 7, body),
        "bounded": el.BoundedWhileLoop(lambda c: c < 7, body, max_steps=10),
        "checkpointed": el.CheckpointedWhileLoop(lambda c: c < 7, body),
    }
    assert jax.jit(loops[kind])(0) == 7
    jax.effects_barrier()
    assert sorted(map(int, ran)) == list(range(7))
