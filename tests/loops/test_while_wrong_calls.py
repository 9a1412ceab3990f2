"""Wrong calls of the while loops: each says where, what was wrong, and what to do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_raises


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
NOT_BOOLEAN = "TypeError: WhileLoop: `cond` … scalar boolean … "
ADVICE = ". Compare … (`x > 0`) … (`jnp.any`)"

WRONG = {
    # The functions
    "body takes more": (
        lambda: run(lambda i, x: (i, x), (0, 1.0)),
        "TypeError: WhileLoop: `body` … missing … 'x' … `body(carry)`",
    ),
    "cond takes more": (
        lambda: run(cond=lambda i, x: i > 0),
        "TypeError: WhileLoop: `cond` … missing … 'x' … `cond(carry)`",
    ),
    "the other way round": (
        lambda: el.WhileLoop(keep, positive)(1.0),
        "TypeError: WhileLoop: `body` returned … `cond` … `el.WhileLoop(cond, body)`",
    ),
    "an output": (
        lambda: run(lambda carry: (carry, None), ZEROS),
        "TypeError: WhileLoop: `body` … next carry alone … `el.ScanWhile`",
    ),
    "nothing returned": (
        lambda: run(becomes(None)),
        "TypeError: WhileLoop: `body` … None … `return`",
    ),
    "a schedule": (
        lambda: checkpointed(schedule=el.StoreAll()),
        "TypeError: CheckpointedWhileLoop(cond, body): … 'schedule' … `el.ScanWhile(",
    ),
    "a plan": (
        lambda: checkpointed().plan(ZEROS),
        "AttributeError: CheckpointedWhileLoop: … no `plan` … `el.plans(f)(*args)` … "
        "`el.ScanWhile",
    ),
    # The condition
    "many conditions": (lambda: condition(ZEROS > 0), NOT_BOOLEAN + "bool[3]" + ADVICE),
    "a number": (lambda: condition(ZEROS[0]), NOT_BOOLEAN + "float32[]" + ADVICE),
    "an int": (lambda: condition(1), NOT_BOOLEAN + "1" + ADVICE),
    "none": (lambda: condition(None), NOT_BOOLEAN + "None" + ADVICE),
    "a pair": (
        lambda: condition((True, False)),
        NOT_BOOLEAN + "(True, False)" + ADVICE,
    ),
    "always": (
        lambda: condition(True),
        "ValueError: WhileLoop: `cond` … constant True … Return … `x > 0` … number … "
        "`el.BoundedWhileLoop`",
    ),
    "always, with slots": (
        lambda: el.CheckpointedWhileLoop(lambda c: True, keep)(ZEROS),
        "ValueError: CheckpointedWhileLoop: `cond` … constant True",
    ),
    # The carry
    "shape": (
        lambda: run(becomes(State(jnp.zeros(4))), State(ZEROS)),
        "TypeError: WhileLoop: … carry.h: float32[3] … float32[4]",
    ),
    "several leaves": (
        lambda: run(becomes((jnp.zeros(4), 1, ZEROS)), (ZEROS, 1, jnp.zeros(3, int))),
        "TypeError: WhileLoop: … carry[0]: float32[3] … float32[4] … "
        "carry[2]: int32[3] … float32[3] … "
        "(cast it with .astype, or start from a float32)",
    ),
    "structure": (
        lambda: run(lambda c: {"a": c["a"]}, {"a": ZEROS[0], "b": ZEROS}),
        "TypeError: WhileLoop: … carry['b'] came in … not come out",
    ),
    "static leaf": (
        lambda: run(becomes((ZEROS[0], "other")), (ZEROS[0], "name")),
        "ValueError: WhileLoop: … carry[1]: 'name' … 'other' … Return",
    ),
    "annotation": (lambda: run(annotated, ZEROS), "TypeCheckError: … annotated"),
    # Settings
    "no bound": (lambda: bounded(), "TypeError: … max_steps"),
    "bound is a bool": (
        lambda: bounded(max_steps=True),
        "TypeError: BoundedWhileLoop: `max_steps` … int … True",
    ),
    "bound is traced": (
        lambda: jax.jit(lambda n: bounded(max_steps=n))(3),
        "TypeError: BoundedWhileLoop: `max_steps` … int … int32[]",
    ),
    # Reverse mode
    "gradient": (
        lambda: jax.grad(lambda x: run(lambda c: c - 1, x))(3.5),
        "ValueError: WhileLoop … reverse mode (`jax.grad`, `jax.vjp`) … "
        "`el.BoundedWhileLoop(cond, body, max_steps=...)` … "
        "`el.CheckpointedWhileLoop(cond, body)` … forward mode",
    ),
    "gradient under jit": (
        lambda: jax.grad(jax.jit(lambda x: run(lambda c: c - 1, x)))(3.5),
        "ValueError: WhileLoop … reverse mode",
    ),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_raises(*WRONG[name])


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
