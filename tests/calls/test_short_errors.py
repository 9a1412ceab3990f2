"""Errors while a gradient is taken: the lines of users, and no line of ours.

JAX calls the rules of a loop long after the call of the user, and adds to an error
where the operation comes from. That is the user's line, too.
"""

import pickle
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

H, XS = jnp.zeros(3), jnp.ones((20, 3))
PACKAGE = str(Path(el.__file__).parent)
SMALL = el.Budget(8, measure=False)
less, more = (lambda x: jnp.sum(x) < 3), (lambda x: x + 1)
step = lambda h, x: (jnp.tanh(h + x), h)


PLAN = el.CheckpointedScan(step).plan(H, jnp.ones((30, 3)))


def loss(h):
    return jnp.sum(el.Scan(step, schedule=SMALL)(h, XS[:3])[0])


def of_other_steps(h):
    return jnp.sum(el.Scan(step, schedule=PLAN.pinned)(h, XS)[0])


def of_rows(rows):
    return jnp.sum(jax.vmap(of_other_steps)(rows))


def of_while(h):
    return jnp.sum(el.WhileLoop(less, more)(h))


def nested(inner):
    return lambda h: jnp.sum(
        el.CheckpointedScan(lambda h, x: (inner(h) * x, None))(h, XS)[0]
    )


WHILE = nested(el.WhileLoop(less, more))
OF_JAX = nested(lambda h: lax.while_loop(less, more, h))
CALLS = {
    "a budget": lambda: jax.grad(loss)(H),
    "a budget, compiled": lambda: jax.jit(jax.grad(loss))(H),
    "a plan": lambda: jax.grad(of_other_steps)(H),
    "a plan, compiled": lambda: jax.jit(jax.grad(of_other_steps))(H),
    "a plan, compiled before": lambda: jax.grad(jax.jit(of_other_steps))(H),
    "a plan, mapped": lambda: jax.vmap(jax.grad(of_other_steps))(XS),
    "a plan in a map": lambda: jax.grad(of_rows)(XS),
    "a plan in a loop": lambda: jax.jit(jax.grad(nested(of_other_steps)))(H),
    "a plan and Equinox": lambda: eqx.filter_grad(of_other_steps)(H),
    "a plan and vjp": lambda: jax.vjp(of_other_steps, H),
    "a plan and linearize": lambda: jax.linearize(jax.grad(of_other_steps), H),
    "a while loop": lambda: jax.grad(of_while)(H),
    "a while loop, compiled": lambda: jax.jit(jax.grad(of_while))(H),
    "a while loop, compiled before": lambda: jax.grad(jax.jit(of_while))(H),
    "a while loop, twice": lambda: jax.hessian(of_while)(H),
    "a while loop in a loop": lambda: jax.grad(WHILE)(H),
    "a while loop in a loop, compiled": lambda: jax.jit(jax.grad(WHILE))(H),
    "one of JAX in a loop": lambda: jax.grad(OF_JAX)(H),
    "one of JAX in a loop, compiled": lambda: jax.jit(jax.grad(OF_JAX))(H),
}


def error_of(name):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        CALLS[name]()
    return caught.value


@pytest.mark.parametrize("name", CALLS)
def test_only_lines_of_users_are_shown(name):
    error = error_of(name)
    text = "".join(traceback.format_exception(error))
    assert PACKAGE not in text
    assert "\nValueError: " in text
    # Once, and once more by JAX.
    assert text.count(str(error)) <= 2
    assert __file__ in text


def test_what_was_compiled_before_has_the_line_that_was():
    error = error_of("a while loop, compiled before")
    (frame,) = traceback.extract_tb(error.__cause__.__traceback__)
    assert (frame.filename, frame.name) == (__file__, "of_while")


@pytest.mark.slow
def test_all_is_shown_if_asked_for():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = error_of("a while loop, compiled")
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert PACKAGE in "".join(traceback.format_exception(error))


def test_it_is_a_value_error_elsewhere():
    error = error_of("a while loop")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ValueError
    assert str(again) == str(error)
