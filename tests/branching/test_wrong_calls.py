"""Wrong calls of the branching modules, and what is said of them."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..weights import without_key

X = jnp.zeros(3)


def cond(one: Any, other: Any) -> Any:
    """A call of a `Cond` that chooses between these two."""
    return el.Cond(lambda: one, lambda: other)(True)


def switch(*values: Any) -> Any:
    return el.Switch([lambda value=value: value for value in values])(0)


TYPES = ": all branches must return the same shapes and dtypes, but they do not:\n"
STRUCTURE = ": all branches must return the same structure, but they do not:\n"
STATIC = (
    ": all branches must return equal leaves where they are not arrays, but they do "
    "not:\n"
)
LINEARS = [without_key(eqx.nn.Linear, 1, n) for n in (2, 3)]

WRONG = {
    # What is returned
    "shape": (
        lambda: cond({"a": [X]}, {"a": [jnp.zeros(4)]}),
        TypeError,
        "Cond" + TYPES + "  out['a'][0]: float32[4] from false_f, float32[3] from "
        "true_f",
    ),
    "dtype": (
        lambda: switch(X, X, X.astype(int)),
        TypeError,
        "Switch" + TYPES + "  out: float32[3] from branches[0], int32[3] from "
        "branches[2]",
    ),
    "every leaf and branch that differs": (
        lambda: switch((X, X), (X[0], X), (X, X[0]), (X[0], X)),
        TypeError,
        "  out[0]: float32[3] from branches[0], float32[] from branches[1]\n"
        "  out[0]: float32[3] from branches[0], float32[] from branches[3]\n"
        "  out[1]: float32[3] from branches[0], float32[] from branches[2]",
    ),
    "a number that an array cannot be": (
        lambda: switch(1.5, jnp.zeros((), int), 2),
        TypeError,
        TYPES + "  out: int32[] from branches[1], 1.5 from branches[0]",
    ),
    "a number beside a key": (
        lambda: cond(jax.random.key(0), 0.0),
        TypeError,
        TYPES + "  out: key<fry>[] from true_f, 0.0 from false_f",
    ),
    "an array beside a string": (
        lambda: cond((X, "a"), ("a", "a")),
        TypeError,
        TYPES + "  out[0]: float32[3] from true_f, 'a' from false_f",
    ),
    "an array beside None": (
        lambda: cond(X, None),
        TypeError,
        TYPES + "  out: float32[3] from true_f, None from false_f",
    ),
    "containers": (
        lambda: switch({"a": (X,), "b": X}, {"a": [X], "c": X}),
        TypeError,
        "Switch"
        + STRUCTURE
        + "  out['a']: tuple of 1 from branches[0], list of 1 from "
        "branches[1]\n  out['b']: float32[3] from branches[0], nothing from "
        "branches[1]\n  out['c']: nothing from branches[0], float32[3] from "
        "branches[1]",
    ),
    "static fields": (
        lambda: switch(*LINEARS),
        TypeError,
        STRUCTURE + "  out: Linear with other static fields from branches[0] than from "
        "branches[1]\n  out.out_features: 2 from branches[0], 3 from branches[1]",
    ),
    "static leaves": (
        lambda: cond({"act": "relu", "x": X}, {"act": "tanh", "x": X}),
        ValueError,
        "Cond" + STATIC + "  out['act']: 'tanh' from false_f, 'relu' from true_f",
    ),
    # What chooses
    "pred of numbers": (
        lambda: el.Cond(jnp.sin, jnp.cos)(1j, X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is 1j. Compare it (`x > 0`), "
        "reduce it (`jnp.any`), or map over it (`jax.vmap`).",
    ),
    "many preds": (
        lambda: jax.jit(lambda x: el.Cond(jnp.sin, jnp.cos)(x > 0, x))(X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is bool[3].",
    ),
    "many numbers": (
        lambda: el.Cond(jnp.sin, jnp.cos)(X, X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is float32[3].",
    ),
    "one number in a list": (
        lambda: el.Cond(jnp.sin, jnp.cos)([1], X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is [1].",
    ),
    "pred is a key": (
        lambda: el.Cond(jnp.sin, jnp.cos)(jax.random.key(0), X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is key<fry>[].",
    ),
    "a condition that is a number": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([1, 0], X),
        TypeError,
        "IfElse: `conditions[0]` must be a scalar boolean, but it is 1.",
    ),
    "pred is no array": (
        lambda: el.Cond(jnp.sin, jnp.cos)(None, X),
        TypeError,
        "Cond: `pred` must be a scalar boolean, but it is None.",
    ),
    "index of floats": (
        lambda: el.Switch([jnp.sin])(1.0, X),
        TypeError,
        "Switch: `index` must be a scalar integer, but it is 1.0. To choose by a "
        "boolean, use `el.Cond`.",
    ),
    "index of booleans": (
        lambda: el.Switch([jnp.sin])(np.bool_(True), X),
        TypeError,
        "Switch: `index` must be a scalar integer, but it is bool[]",
    ),
    "many indices": (
        lambda: el.Switch([jnp.sin])(jnp.arange(3), X),
        TypeError,
        "Switch: `index` must be a scalar integer, but it is int32[3].",
    ),
    "index is no array": (
        lambda: el.Switch([jnp.sin])("first", X),
        TypeError,
        "Switch: `index` must be a scalar integer, but it is 'first'.",
    ),
    "too few conditions": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([True], X),
        ValueError,
        "IfElse: there are 2 branches, but 1 conditions: give one for each branch. "
        "For an `else`, give True, and set `check_conditions=False`.",
    ),
    "one condition of many": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([True, X > 0], X),
        TypeError,
        "IfElse: `conditions[1]` must be a scalar boolean, but it is bool[3].",
    ),
    "conditions are no vector": (
        lambda: el.IfElse([jnp.sin, jnp.cos])(jnp.array(True), X),
        TypeError,
        "IfElse: `conditions` must be a list or tuple of booleans, or one boolean "
        "vector, with one for each branch, but it is bool[].",
    ),
    "conditions of numbers": (
        lambda: el.IfElse([jnp.sin, jnp.cos])(jnp.arange(2), X),
        TypeError,
        "with one for each branch, but it is int32[2].",
    ),
    # Construction
    "a branch that is no function": (
        lambda: el.Cond(jnp.sin, 0.0),
        TypeError,
        "Cond: `false_f` must be callable, but it is 0.0. For a branch that returns "
        "a constant, write `lambda *_: value`.",
    ),
    "one of several branches": (
        lambda: el.Switch([jnp.sin, None]),
        TypeError,
        "Switch: `branches[1]` must be callable, but it is None.",
    ),
    "branches one by one": (
        lambda: el.IfElse(jnp.sin),
        TypeError,
        "IfElse: `branches` must be a list or tuple of functions, but it is ",
    ),
    "no branches": (
        lambda: el.Switch([]),
        ValueError,
        "Switch: `branches` is empty, but there must be one to run.",
    ),
    "check_conditions": (
        lambda: el.IfElse([jnp.sin], check_conditions=1),
        TypeError,
        "IfElse: `check_conditions` must be a bool, not 1.",
    ),
    # What is passed on
    "arguments": (
        lambda: el.Cond(jnp.sin, lambda: X)(True, X),
        TypeError,
        "takes 0 positional arguments but 1 was given",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_errors_come_before_anything_runs():
    ran: list[int] = []

    def branch(x):
        jax.debug.callback(lambda: ran.append(1))
        return x

    with pytest.raises(TypeError):
        el.Cond(branch, lambda x: x[0])(True, X)
    jax.effects_barrier()
    assert ran == []
