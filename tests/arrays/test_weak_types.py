"""Loops and maps give weakly typed results where JAX's own do, and nowhere else."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

pytestmark = pytest.mark.sampled

Loop = Callable[[Any], Any]


def body(carry: Any) -> Any:
    i, doubled, firm, same = carry
    return i + 1, doubled * 2, firm * 2, same


def going(carry: Any) -> Any:
    return carry[0] < 3


def step(carry: Any, x: Any) -> Any:
    return body(carry), {"weak": carry[1] + 1, "number": 1.0, "firm": carry[2]}


def start(y: Any) -> Any:
    return jnp.asarray(0), y, jnp.float32(1), jnp.asarray(2.0)


LOOPS: dict[str, tuple[Loop, Loop]] = {
    str(schedule): (
        functools.partial(el.Scan(step, schedule=schedule), length=3),
        lambda init: lax.scan(step, init, length=3),
    )
    for schedule in (el.StoreAll(), el.Recursive(2), el.Binomial(2), el.Chunked(2))
}
for loop in (
    el.WhileLoop(going, body),
    el.CheckpointedWhileLoop(going, body),
    el.BoundedWhileLoop(going, body, max_steps=4),
):
    LOOPS[type(loop).__name__] = (loop, lambda init: lax.while_loop(going, body, init))

MODES: dict[str, Callable[[Loop], Any]] = {
    "eager": lambda loop: loop(start(jnp.asarray(1.0))),
    "compiled": lambda loop: jax.jit(lambda y: loop(start(y)))(1.0),
    "linearized": lambda loop: jax.linearize(lambda y: loop(start(y)), 1.0)[0],
    "batched": lambda loop: jax.vmap(lambda y: loop(start(y)))(jnp.ones(2)),
}


def weak(tree: Any) -> Any:
    # A Python number, which JAX's scan may hand back from `linearize`, is as weak.
    return jax.tree.map(lambda x: getattr(x, "weak_type", True), tree)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: str, mode: str):
    ours, theirs = (weak(MODES[mode](f)) for f in LOOPS[loop])
    assert ours == theirs
    assert True in jax.tree.leaves(ours)
    assert False in jax.tree.leaves(ours)


@pytest.mark.parametrize("transform", [el.Map, el.Vmap, lambda f: el.ChunkedVmap(f, 2)])
def test_maps(transform: Any):
    row = lambda x: (x * 2, jnp.float32(1) * x)
    weakly = jnp.broadcast_to(jnp.asarray(2.0), 3)
    assert weakly.weak_type
    for x in (weakly, jnp.full(3, jnp.float32(2))):
        assert weak(jax.jit(transform(row))(x)) == weak(jax.jit(jax.vmap(row))(x))


def test_what_one_leaf_loses_others_keep():
    def turn(carry: Any) -> Any:
        return carry[0] + jnp.float32(1), carry[0] * 2, carry[2] + 1

    step = lambda carry, _: (turn(carry), carry[0])
    init = jnp.asarray(0.0), jnp.asarray(1.0), jnp.asarray(2.0)
    ours = el.CheckpointedScan(step, 2)(init, length=3)
    assert weak(ours) == weak(lax.scan(step, init, length=3))
    assert weak(ours) == ((False, True, True), True)
    going = lambda carry: carry[0] < 3
    ours = el.CheckpointedWhileLoop(going, turn)(init)
    assert weak(ours) == weak(lax.while_loop(going, turn, init))


def test_a_gradient_passes_a_weak_type():
    run = lambda y: el.CheckpointedScan(step, 2)(start(y), length=3)[0][1]
    assert jax.grad(run)(1.0) == 8
    assert jax.hessian(lambda y: run(y) * y)(1.0) == 16
