"""What is only there for derivatives, in steps that are only run."""

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el
from eqloop._programs._calculus import run, settled
from eqloop._programs._equations import equations, formula_of
from eqloop.checkpointing.steps._dce import dce_step
from eqloop.checkpointing.steps._step import make_step

Y = jnp.array([0.3, -0.2, 0.5])


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
    assert slots(dce_step(primal)) == [[]]
    for found in (primal, dce_step(primal)):
        np.testing.assert_allclose(run(found.jaxpr, Y), run(step.jaxpr, Y), rtol=1e-6)
