"""Which outputs of a program depend on which inputs: where it loops, and refers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop._programs._equations import formula_of
from eqloop._programs._reaching import moving_inputs, reached
from eqloop.checkpointing.engine._transformed import activity

W = jnp.array([0.5, 2.0])


def reaching(f: Callable[..., Any], *args: Any) -> list[list[bool]]:
    """For each input, which outputs depend on it."""
    program = jax.make_jaxpr(f)(*args)
    places = range(len(program.in_avals))
    return [list(reached(program, tuple(i == j for j in places))) for i in places]


def checkpointed(going: Any, body: Any, init: Any) -> Any:
    return el.CheckpointedWhileLoop(going, body, max_steps=9)(init)


@pytest.mark.parametrize("loop", [lax.while_loop, checkpointed])
def test_who_decides_when_a_loop_ends_decides_on_its_carry(loop):
    def f(stop: Any, x: Any, y: Any) -> Any:
        going = lambda carry: carry[0] < stop
        body = lambda carry: (carry[0] + 1, carry[1] * 2, carry[2] - 1)
        return loop(going, body, (0, x, y))

    of_stop, of_x, of_y = reaching(f, 3, 1.0, 2.0)
    assert of_stop == [True, True, True]
    assert of_x == [False, True, False]
    assert of_y == [False, False, True]


@pytest.mark.parametrize("loop", ["scan", "while", "Scan", "CheckpointedWhileLoop"])
def test_what_a_loop_passes_on_from_step_to_step(loop):
    def f(a: Any, b: Any, c: Any) -> Any:
        turn = lambda carry: (carry[1], carry[2], carry[2] + 1)
        if loop == "scan":
            step = lambda carry, _: (turn(carry), None)
            return lax.scan(step, (a, b, c), length=3)[0]
        if loop == "Scan":
            step = lambda carry, _: (turn(carry), None)
            scan = el.Scan(step, schedule=el.Recursive(2))
            return scan((a, b, c), length=3)[0]
        going = lambda carry: carry[0] < 3
        body = lambda carry: (carry[0] + 1, *turn(carry[1:]))
        run = lax.while_loop if loop == "while" else checkpointed
        return run(going, body, (0, a, b, c))[1:]

    of_a, of_b, of_c = reaching(f, 1.0, 2.0, 3.0)
    assert of_a == [True, False, False]
    assert of_b == [True, True, False]
    assert of_c == [True, True, True]


def test_a_sum_over_an_axis_is_the_same_along_that_axis_alone():
    f = lambda x: (lax.psum(x, "a"), lax.psum(x, "b"), lax.axis_index("b"))
    program = jax.make_jaxpr(f, axis_env=[("a", 2), ("b", 2)])(1.0)
    assert reached(program, (True,), axis_name="a") == (False, True, False)
    assert reached(program, (True,), axis_name="b") == (True, False, True)
    assert reached(program, (False,), axis_name="b") == (False, False, True)


def test_a_reference_is_read_in_the_step_after_that_which_wrote():
    def step(ref: Any, x: Any, y: Any) -> Any:
        seen = ref[...] * 2
        ref[...] = x
        return seen, y + 1

    _, of_x, of_y = reaching(step, jax.new_ref(jnp.float32(0)), jnp.float32(1), 2.0)
    assert of_x == [True, False]
    assert of_y == [False, True]


@pytest.mark.parametrize("f", [lax.stop_gradient, jnp.floor, jnp.ceil, lax.round])
def test_a_derivative_does_not_reach_what_has_no_tangent(f):
    @jax.custom_jvp
    def sees(x: Any) -> Any:
        return x

    @functools.partial(sees.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        # So it is in JAX.
        assert isinstance(tangents[0], jax.custom_derivatives.SymbolicZero)
        return primals[0], tangents[0]

    jax.jvp(lambda x: sees(f(x)), (1.5,), (1.0,))
    program = jax.make_jaxpr(f)(1.5)
    assert reached(program, (True,), is_derivative=True) == (False,)
    assert reached(program, (True,)) == (True,)


def test_all_inputs_of_a_loop_are_followed_at_once():
    def step(carry: Any, x: Any) -> Any:
        a, b, c, i = carry
        still = lax.stop_gradient(c) * i
        return (a + b, b * W[0] + still, x[0] - still, i + 1), (a, c + W[1], i)

    init = (1.0, 2.0, 3.0, 4)
    run = lambda init, xs: el.Scan(step, schedule=el.Recursive(4))(init, xs)
    program = jax.make_jaxpr(run)(init, (jnp.ones(8), jnp.arange(8)))
    formulas = filter(None, map(formula_of, program.eqns))
    (loop,) = (formula for formula in formulas if formula.steps is not None)
    expected: list[list[int]] = [[] for _ in loop.out_avals_flat]
    for i in range(count := len(loop.in_avals_flat)):
        marks = loop.in_tree.unflatten([i == j for j in range(count)])
        active, ys = activity(loop.problem.step, marks)
        for of, is_moved in zip(expected, (*active.carry, *ys), strict=False):
            of += [i] * is_moved
    assert moving_inputs(loop) == expected
    assert max(map(len, expected)) == 3
