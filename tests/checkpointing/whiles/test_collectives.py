"""While loops whose examples communicate under `vmap`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

from ...marks import slow

pytestmark = pytest.mark.sampled

LOOPS = {
    "WhileLoop": el.WhileLoop,
    "Checkpointed": lambda c, b: el.CheckpointedWhileLoop(c, b, max_steps=8),
    "Bounded": lambda c, b: el.BoundedWhileLoop(c, b, max_steps=8),
}
STEPS, STATES = jnp.array([2, 5]), jnp.array([0.3, 0.9])
COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "b"),
    "pmax": lambda x: lax.pmax(x, "b"),
    "pmean": lambda x: lax.pmean(x.astype(jnp.float32), "b").astype(x.dtype),
    "all_gather": lambda x: lax.all_gather(x, "b")[0],
    "unvmap": lambda x: el.unvmap(x, "min"),
}


def plain(cond: Any, body: Any) -> Any:
    return lambda c: lax.while_loop(cond, body, c)


def masked(cond: Any, body: Any) -> Any:
    """Eight steps, of which those after the end change nothing."""

    def run(c: Any) -> Any:
        for _ in range(8):
            on = cond(c)
            c = jax.tree.map(lambda a, b, on=on: jnp.where(on, a, b), body(c), c)
        return c

    return run


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_an_example_that_has_stopped_takes_part(kind, name):
    def total(loop: Any, n: Any) -> Any:
        body = lambda c: (c[0] + 1, c[1] + COLLECTIVES[name](c[0]))
        return loop(lambda c: c[0] < n, body)((jnp.array(0), jnp.array(0)))[1]

    got, want = (
        jax.vmap(lambda n, loop=loop: total(loop, n), axis_name="b")(STEPS)
        for loop in (LOOPS[kind], plain)
    )
    np.testing.assert_array_equal(got, want)


def coupled(loop: Any, n: Any, h: Any) -> Any:
    body = lambda c: (c[0] + 1, jnp.sin(c[1] + lax.pmean(c[1], "b")))
    return loop(lambda c: c[0] < n, body)((jnp.array(0), h))[1]


@pytest.mark.parametrize(
    ("kind", "derive"),
    [
        ("Checkpointed", jax.grad),
        slow("Checkpointed", jax.hessian),
        slow("Bounded", jax.grad),
        ("Bounded", jax.hessian),
    ],
)
def test_derivatives_of_a_batch(kind, derive):
    def total(loop: Any) -> Any:
        run = lambda n, h: coupled(loop, n, h)
        return lambda h: jnp.sum(jnp.cos(jax.vmap(run, axis_name="b")(STEPS, h)))

    got, want = (jax.jit(derive(total(f)))(STATES) for f in (LOOPS[kind], masked))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def counting(loop: Any, n: Any, h: Any) -> Any:
    """What the examples tell each other is counted, and has no derivative."""

    def body(c: Any) -> Any:
        i, told, h = c
        return i + 1, told + lax.psum(i, "b"), jnp.sin(h * told.astype(h.dtype))

    return loop(lambda c: c[0] < n, body)((jnp.array(0), jnp.array(1), h))[2]


@pytest.mark.parametrize("run", [coupled, counting])
@pytest.mark.parametrize("kind", ["Checkpointed", "Bounded"])
def test_a_batch_of_derivatives_keeps_in_step(kind, run):
    def batch(loop: Any) -> Any:
        one = lambda n, h: jax.value_and_grad(lambda h: run(loop, n, h))(h)
        return jax.vmap(one, axis_name="b")(STEPS, STATES)

    got, want = (jax.jit(lambda f=f: batch(f))() for f in (LOOPS[kind], masked))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("schedule", [el.Binomial(2), slow(el.Recursive(2))], ids=str)
def test_an_axis_along_which_nothing_is_batched(schedule):
    xs = jnp.linspace(0.5, 1.5, 4)
    index = lambda: lax.axis_index("b").astype(jnp.float32)
    step = lambda h, x: jnp.sin(h * x) + index() * lax.pmean(h, "b")

    def ours(h: Any) -> Any:
        return el.Scan(lambda h, x: (step(h, x), None), schedule=schedule)(h, xs)[0]

    def written_out(h: Any) -> Any:
        for x in xs:
            h = step(h, x)
        return h

    for derive in (lambda f: f, jax.grad, jax.hessian):
        got, want = (
            jax.jit(jax.vmap(derive(f), None, axis_name="b", axis_size=2))(0.4)
            for f in (ours, written_out)
        )
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
