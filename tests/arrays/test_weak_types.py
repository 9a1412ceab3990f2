"""Loops and maps give weakly typed results where JAX's own do, and nowhere else."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


# Of any length, no steps included.

STEPS: dict[str, tuple[Callable[..., Any], Any]] = {
    "what it adds is not weak": (lambda c, x: (c + x, c), 0.0),
    "nor is what comes in": (lambda c, x: (c + x, c), jnp.float32(0)),
    "what it does leaves it weak": (lambda c, x: (c * 2, (c, 3.0, x)), 1.0),
    "it hands it on": (lambda c, x: (c, c + x), 1.0),
    "one of two": (lambda c, x: ((c[0] + 1, c[1] + x), c), (0, 1.0)),
    "a number for an array": (lambda c, x: (1.0, c), None),
    "a number for a number": (lambda c, x: (2.0, c), 1.0),
    "a bool": (lambda c, x: (c & (x > 0), c), True),
    "a number of another type": (lambda c, x: (c + x, c), 1),
}
SCANS: dict[str, Callable[..., Any]] = {
    "Scan": lambda f, init, xs: el.Scan(f)(init, xs),
    "CheckpointedScan": lambda f, init, xs: el.CheckpointedScan(f)(init, xs),
    "Budget": lambda f, init, xs: el.Scan(f, schedule=el.Budget("1MiB", measure=False))(
        init, xs
    ),
    "SlicedScan": lambda f, init, xs: el.SlicedScan(f, step=1)(init, xs),
    "ScanWhile": lambda f, init, xs: el.ScanWhile(lambda c: True, f, max_steps=len(xs))(
        init, xs
    )[:2],
    "stopped": lambda f, init, xs: el.ScanWhile(lambda c: False, f, max_steps=len(xs))(
        init, xs
    )[:2],
    "a gradient": lambda f, init, xs: jax.vjp(
        lambda xs: el.CheckpointedScan(f)(init, xs), xs
    )[0],
}


def kinds(run: Callable[[], Any]) -> Any:
    shapes = jax.eval_shape(run)
    return jax.tree.map(lambda s: (s.shape, s.dtype, s.weak_type), shapes)


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.usefixtures("either_width")
def test_types_do_not_depend_on_the_length(scan: str, case: str):
    f, init = STEPS[case]
    if case == "a number for an array":
        init = jnp.asarray(np.ones(()))  # as wide as the number
    for length in (0, 1, 3):
        xs = jnp.zeros(length, jnp.float32)
        ours = kinds(lambda xs=xs: SCANS[scan](f, init, xs))
        assert ours == kinds(lambda xs=xs: lax.scan(f, init, xs))


def test_no_steps_outside_of_jit_and_while_loops():
    f, init = STEPS["what it adds is not weak"]
    for kind in (el.Scan, el.CheckpointedScan):
        ours, theirs = kind(f)(init, jnp.zeros(0)), lax.scan(f, init, jnp.zeros(0))
        assert weak(ours) == weak(theirs)
    turn = lambda c: (c[0] + jnp.float32(1), c[1] * 2, 1.0)
    init = (0.0, 1.0, jnp.float32(1))
    for going in (lambda c: c[0] < 0, lambda c: c[0] < 3):
        theirs = lax.while_loop(going, turn, init)
        for loop in (
            el.WhileLoop(going, turn),
            el.CheckpointedWhileLoop(going, turn),
            el.BoundedWhileLoop(going, turn, max_steps=0),
        ):
            assert weak(loop(init)) == weak(theirs) == (False, True, True)
