"""Wrong calls of the while loops: each says where, what was wrong, and what to do."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError

import eqloop as el


class State(eqx.Module):
    h: Any
    n: Any = None


def positive(carry: Any) -> Any:
    return jax.tree.leaves(carry)[0] > 0


def keep(carry: Any) -> Any:
    return carry


def annotated(carry: Float[Array, ""]) -> Any:
    return carry


def becomes(new: Any) -> Any:
    return lambda carry: new


def run(body: Any = keep, init: Any = 0.0, cond: Any = positive) -> Any:
    return el.WhileLoop(cond, body)(init)


def condition(out: Any) -> Any:
    return run(init=jnp.zeros(3), cond=lambda carry: out)


def bounded(**settings: Any) -> Any:
    return el.BoundedWhileLoop(positive, keep, **settings)


def checkpointed(**settings: Any) -> Any:
    return el.CheckpointedWhileLoop(positive, keep, **settings)


ZEROS = jnp.zeros(3)
CHANGED = (
    "WhileLoop: the carry must keep its shape, dtype and structure from step to step, "
    "but body changed it:\n"
)
NOT_BOOLEAN = "WhileLoop: `cond` must return a scalar boolean, but it returned "
ADVICE = ". Compare it (`x > 0`), reduce it (`jnp.any`), or map over the loop"

WRONG = {
    # The functions
    "cond is none": (
        lambda: el.WhileLoop(1, keep),
        TypeError,
        "WhileLoop: `cond` must be callable, but 1 is not.",
    ),
    "body is none": (
        lambda: el.BoundedWhileLoop(positive, None, max_steps=3),
        TypeError,
        "BoundedWhileLoop: `body` must be callable, but None is not.",
    ),
    # The condition
    "many conditions": (
        lambda: condition(ZEROS > 0),
        TypeError,
        NOT_BOOLEAN + "bool[3]" + ADVICE,
    ),
    "a number": (
        lambda: condition(ZEROS[0]),
        TypeError,
        NOT_BOOLEAN + "float32[]" + ADVICE,
    ),
    "an int": (lambda: condition(1), TypeError, NOT_BOOLEAN + "1" + ADVICE),
    "none": (lambda: condition(None), TypeError, NOT_BOOLEAN + "None" + ADVICE),
    "a pair": (
        lambda: condition((True, False)),
        TypeError,
        NOT_BOOLEAN + "(True, False)" + ADVICE,
    ),
    "always": (
        lambda: condition(True),
        ValueError,
        "WhileLoop: `cond` returned the constant True, so the loop would never stop. "
        "Return an array that depends on the carry, as in `x > 0`, or bound the number "
        "of steps, as `el.BoundedWhileLoop` does.",
    ),
    "always, with slots": (
        lambda: el.CheckpointedWhileLoop(lambda c: True, keep)(ZEROS),
        ValueError,
        "CheckpointedWhileLoop: `cond` returned the constant True, so the loop",
    ),
    # The carry
    "shape": (
        lambda: run(becomes(State(jnp.zeros(4))), State(ZEROS)),
        TypeError,
        CHANGED + "  carry.h: float32[3] came in, float32[4] came out",
    ),
    "several leaves": (
        lambda: run(becomes((jnp.zeros(4), 1, ZEROS)), (ZEROS, 1, jnp.zeros(3, int))),
        TypeError,
        CHANGED + "  carry[0]: float32[3] came in, float32[4] came out\n"
        "  carry[2]: int32[3] came in, float32[3] came out (cast it with .astype, or "
        "start from a float32)",
    ),
    "structure": (
        lambda: run(lambda c: {"a": c["a"]}, {"a": ZEROS[0], "b": ZEROS}),
        TypeError,
        CHANGED + "  carry['b'] came in, but did not come out",
    ),
    "static leaf": (
        lambda: run(becomes((ZEROS[0], "other")), (ZEROS[0], "name")),
        ValueError,
        "WhileLoop: only arrays and numbers can change from step to step, but body "
        "changed these leaves of the carry:\n  carry[1]: 'name' came in, 'other' came "
        "out\nReturn them unchanged, or make them arrays.",
    ),
    "annotation": (lambda: run(annotated, ZEROS), TypeCheckError, "annotated"),
    # Settings
    "no bound": (lambda: bounded(), TypeError, "max_steps"),
    "bound is no int": (
        lambda: bounded(max_steps=10.0),
        TypeError,
        "BoundedWhileLoop: `max_steps` must be an int that is known when tracing, "
        "not 10.0.",
    ),
    "bound is a bool": (
        lambda: bounded(max_steps=True),
        TypeError,
        "BoundedWhileLoop: `max_steps` must be an int that is known when tracing, "
        "not True.",
    ),
    "bound is traced": (
        lambda: jax.jit(lambda n: bounded(max_steps=n))(3),
        TypeError,
        "BoundedWhileLoop: `max_steps` must be an int that is known when tracing, "
        "not int32[].",
    ),
    "negative bound": (
        lambda: bounded(max_steps=-1),
        ValueError,
        "BoundedWhileLoop: `max_steps` must be at least 0, but it is -1.",
    ),
    "base": (lambda: bounded(max_steps=9, base=1), ValueError, "base"),
    "no slots": (
        lambda: checkpointed(checkpoints=0),
        ValueError,
        "CheckpointedWhileLoop: `checkpoints` must be at least 1, but it is 0.",
    ),
    "slots are no int": (
        lambda: checkpointed(checkpoints="all"),
        TypeError,
        "CheckpointedWhileLoop: `checkpoints` must be an int that is known when "
        "tracing, not 'all'.",
    ),
    "slots and a negative bound": (
        lambda: checkpointed(checkpoints=3, max_steps=-2),
        ValueError,
        "CheckpointedWhileLoop: `max_steps` must be at least 0, but it is -2.",
    ),
    # Reverse mode
    "gradient": (
        lambda: jax.grad(lambda x: run(lambda c: c - 1, x))(3.5),
        ValueError,
        "WhileLoop cannot be differentiated in reverse mode (`jax.grad`, `jax.vjp`), "
        "as that needs memory for a number of steps that is unknown. Use "
        "`el.BoundedWhileLoop(cond, body, max_steps=...)` if there is a bound on the "
        "number of steps, `el.CheckpointedWhileLoop(cond, body)` if there is none, or "
        "forward mode (`jax.jvp`, `jax.jacfwd`).",
    ),
    "gradient under jit": (
        lambda: jax.grad(jax.jit(lambda x: run(lambda c: c - 1, x)))(3.5),
        ValueError,
        "WhileLoop cannot be differentiated in reverse mode",
    ),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("function", ["cond", "body"])
def test_errors_of_functions_say_what_was_being_traced(function):
    def fails(carry):
        raise KeyError("mine")

    functions = {"cond": positive, "body": keep, function: fails}
    with pytest.raises(KeyError) as info:
        el.WhileLoop(**functions)((ZEROS[0], "static"))
    note = "\n".join(info.value.__notes__)
    assert f"This was raised while WhileLoop traced `{function}(carry)` with" in note
    assert "carry = (f32[], 'static')" in note


def test_errors_come_before_anything_runs():
    ran = []

    def body(carry):
        jax.debug.callback(ran.append, carry)
        return carry.astype(int)

    with pytest.raises(TypeError):
        run(body, ZEROS[0])
    jax.effects_barrier()
    assert ran == []
