"""Wrong calls of the branching modules, and what is said of them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_raises
from ..weights import without_key

X = jnp.zeros(3)


def cond(one: Any, other: Any) -> Any:
    """A call of a `Cond` that chooses between these two."""
    return el.Cond(lambda: one, lambda: other)(True)


def switch(*values: Any) -> Any:
    return el.Switch([lambda value=value: value for value in values])(0)


LINEARS = [without_key(eqx.nn.Linear, 1, n) for n in (2, 3)]

WRONG = {
    # What is returned
    "shape": (
        lambda: cond({"a": [X]}, {"a": [jnp.zeros(4)]}),
        "TypeError: Cond: … branches … out['a'][0]: float32[4] … "
        "false_f, float32[3] … true_f",
    ),
    "dtype": (
        lambda: switch(X, X, X.astype(int)),
        "TypeError: Switch: … branches … out: float32[3] … branches[0], int32[3] … "
        "branches[2]",
    ),
    "every leaf and branch that differs": (
        lambda: switch((X, X), (X[0], X), (X, X[0]), (X[0], X)),
        "TypeError: … out[0]: float32[3] … branches[0], float32[] … branches[1] … "
        "out[0]: float32[3] … branches[0], float32[] … branches[3] … "
        "out[1]: float32[3] … branches[0], float32[] … branches[2]",
    ),
    "a number that an array cannot be": (
        lambda: switch(1.5, jnp.zeros((), int), 2),
        "TypeError: … branches … out: int32[] … branches[1], 1.5 … branches[0]",
    ),
    "a number beside a key": (
        lambda: cond(jax.random.key(0), 0.0),
        "TypeError: … branches … out: key<fry>[] … true_f, 0.0 … false_f",
    ),
    "an array beside a string": (
        lambda: cond((X, "a"), ("a", "a")),
        "TypeError: … branches … out[0]: float32[3] … true_f, 'a' … false_f",
    ),
    "an array beside None": (
        lambda: cond(X, None),
        "TypeError: … branches … out: float32[3] … true_f, None … false_f",
    ),
    "containers": (
        lambda: switch({"a": (X,), "b": X}, {"a": [X], "c": X}),
        "TypeError: Switch: … out['a']: tuple … branches[0], list … branches[1] … "
        "out['b']: float32[3] … branches[0], nothing … branches[1] … "
        "out['c']: nothing … branches[0], float32[3] … branches[1]",
    ),
    "static fields": (
        lambda: switch(*LINEARS),
        "TypeError: … branches … structure … out: Linear … static fields … "
        "branches[0] … branches[1] … out.out_features: 2 … branches[0], 3 … "
        "branches[1]",
    ),
    "static leaves": (
        lambda: cond({"act": "relu", "x": X}, {"act": "tanh", "x": X}),
        "ValueError: Cond: … branches … out['act']: 'tanh' … false_f, 'relu' … true_f",
    ),
    # What chooses
    "pred of numbers": (
        lambda: el.Cond(jnp.sin, jnp.cos)(1j, X),
        "TypeError: Cond: `pred` … scalar boolean … 1j. Compare … (`x > 0`) … "
        "(`jnp.any`) … (`jax.vmap`)",
    ),
    "many preds": (
        lambda: jax.jit(lambda x: el.Cond(jnp.sin, jnp.cos)(x > 0, x))(X),
        "TypeError: Cond: `pred` … scalar boolean … bool[3]",
    ),
    "many numbers": (
        lambda: el.Cond(jnp.sin, jnp.cos)(X, X),
        "TypeError: Cond: `pred` … scalar boolean … float32[3]",
    ),
    "one number in a list": (
        lambda: el.Cond(jnp.sin, jnp.cos)([1], X),
        "TypeError: Cond: `pred` … scalar boolean … [1]",
    ),
    "pred is a key": (
        lambda: el.Cond(jnp.sin, jnp.cos)(jax.random.key(0), X),
        "TypeError: Cond: `pred` … scalar boolean … key<fry>[]",
    ),
    "a condition that is a number": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([1, 0], X),
        "TypeError: IfElse: `conditions[0]` … scalar boolean … 1",
    ),
    "index of floats": (
        lambda: el.Switch([jnp.sin])(1.0, X),
        "TypeError: Switch: `index` … scalar integer … 1.0 … boolean … `el.Cond`",
    ),
    "index of booleans": (
        lambda: el.Switch([jnp.sin])(np.bool_(True), X),
        "TypeError: Switch: `index` … scalar integer … bool[]",
    ),
    "too few conditions": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([True], X),
        "ValueError: IfElse: `conditions` … each branch, 2 … has 1. … `else` … True … "
        "`check_conditions=False`",
    ),
    "one condition of many": (
        lambda: el.IfElse([jnp.sin, jnp.cos])([True, X > 0], X),
        "TypeError: IfElse: `conditions[1]` … scalar boolean … bool[3]",
    ),
    "conditions are no vector": (
        lambda: el.IfElse([jnp.sin, jnp.cos])(jnp.array(True), X),
        "TypeError: IfElse: `conditions` … list … tuple … boolean vector … bool[]",
    ),
    "conditions of numbers": (
        lambda: el.IfElse([jnp.sin, jnp.cos])(jnp.arange(2), X),
        "TypeError: … `conditions` … int32[2]",
    ),
    # Construction
    "a branch that is no function": (
        lambda: el.Cond(jnp.sin, 0.0),
        "TypeError: Cond: `false_f` … callable … 0.0 … constant … `lambda *_: value`",
    ),
    "one of several branches": (
        lambda: el.Switch([jnp.sin, None]),
        "TypeError: Switch: `branches[1]` … callable … None",
    ),
    "branches one by one": (
        lambda: el.IfElse(jnp.sin),
        "TypeError: IfElse: `branches` … list … tuple",
    ),
    "no branches": (lambda: el.Switch([]), "ValueError: Switch: `branches` … empty"),
    # What is passed on
    "arguments": (
        lambda: el.Cond(jnp.sin, lambda: X)(True, X),
        "TypeError: Cond … `false_f` … too many positional … `false_f(args[0])`",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_raises(*WRONG[name])


def test_errors_come_before_anything_runs():
    ran: list[int] = []

    def branch(x):
        jax.debug.callback(lambda: ran.append(1))
        return x

    with pytest.raises(TypeError):
        el.Cond(branch, lambda x: x[0])(True, X)
    jax.effects_barrier()
    assert ran == []
