"""Wrong calls of the scans: each says where, what was wrong, and what to do."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..weights import without_key

XS = jnp.arange(4.0)


class State(eqx.Module):
    h: Any
    n: Any = None


def keep(carry: Any, x: Any) -> Any:
    return carry, x


def annotated(carry: Float[Array, ""], x: Any) -> Any:
    return carry, x


def becomes(new: Any) -> Any:
    """An `f` that makes this of the carry."""
    return lambda carry, x: (new, x)


def maps(change: Any) -> Any:
    return lambda carry, x: (change(carry), x)


def scan(f: Any = keep, init: Any = 0.0, xs: Any = XS, **arguments: Any) -> Any:
    """A call, with its settings and its arguments mixed as they come."""
    call = {k: arguments.pop(k) for k in ("length", "key") if k in arguments}
    return el.CheckpointedScan(f, **arguments)(init, xs, **call)


KEYS = jax.random.split(jax.random.key(0), 3)
ZEROS = jnp.zeros(3)
CHANGED = (
    "CheckpointedScan: the carry must keep its shape, dtype and structure from step to "
    "step, but f changed it:\n"
)

WRONG = {
    # The carry
    "shape": (
        lambda: scan(becomes(State(jnp.zeros(4))), State(ZEROS)),
        TypeError,
        CHANGED + "  carry.h: float32[3] came in, float32[4] came out\nReturn the same "
        "shapes, dtypes and structure, or start with those that came out.",
    ),
    "dtype": (
        lambda: scan(maps(lambda n: n / 2), jnp.zeros((), jnp.int32)),
        TypeError,
        CHANGED + "  carry: int32[] came in, float32[] came out (cast it with .astype, "
        "or start from a float32)",
    ),
    "every leaf that differs": (
        lambda: scan(
            becomes({"a": [ZEROS, jnp.ones(2)], "b": jnp.ones(3, int)}),
            {"a": [ZEROS, ZEROS], "b": ZEROS},
        ),
        TypeError,
        CHANGED + "  carry['a'][1]: float32[3] came in, float32[2] came out\n"
        "  carry['b']: float32[3] came in, int32[3] came out (cast it with .astype, or "
        "start from an int32)",
    ),
    "a leaf more": (
        lambda: scan(becomes({"a": 0.0, "b": 0.0}), {"a": 0.0}),
        TypeError,
        CHANGED + "  carry['b'] came out, but had not come in",
    ),
    "a leaf less": (
        lambda: scan(becomes({"a": 0.0}), {"a": 0.0, "b": ZEROS}),
        TypeError,
        CHANGED + "  carry['b'] came in, but did not come out",
    ),
    "container": (
        lambda: scan(becomes({"a": [0.0, 0.0]}), {"a": (0.0, 0.0)}),
        TypeError,
        CHANGED + "  carry['a']: tuple of 2 came in, list of 2 came out",
    ),
    "an array for a tree": (
        lambda: scan(becomes((ZEROS,)), ZEROS),
        TypeError,
        CHANGED + "  carry: float32[3] came in, tuple of 1 came out",
    ),
    "static field": (
        lambda: scan(
            becomes(eqx.nn.Lambda(without_key(eqx.nn.Linear, 2, 3))),
            eqx.nn.Lambda(without_key(eqx.nn.Linear, 2, 4)),
        ),
        TypeError,
        CHANGED + "  carry.fn: the static fields of the Linear changed\n"
        "  carry.fn.out_features: 4 came in, 3 came out",
    ),
    "None becomes an array": (
        lambda: scan(becomes(State(ZEROS, n=ZEROS)), State(ZEROS)),
        TypeError,
        CHANGED + "  carry.n: None came in, float32[3] came out",
    ),
    "an array becomes None": (
        lambda: scan(becomes(State(None)), State(ZEROS)),
        TypeError,
        CHANGED + "  carry.h: float32[3] came in, None came out",
    ),
    "a number becomes a vector": (
        lambda: scan(maps(lambda c: c + ZEROS), 0.0),
        TypeError,
        CHANGED + "  carry: float32[] came in, float32[3] came out",
    ),
    "a number becomes a string": (
        lambda: scan(becomes("a"), 0.0),
        ValueError,
        "  carry: 0.0 came in, 'a' came out",
    ),
    "static leaf": (
        lambda: scan(becomes({"s": "b", "h": 0.0}), {"s": "a", "h": 0.0}),
        ValueError,
        "only arrays and numbers can change from step to step, but f changed these "
        "leaves of the carry:\n  carry['s']: 'a' came in, 'b' came out\nReturn them "
        "unchanged, or make them arrays.",
    ),
    "key style": (
        lambda: scan(maps(jax.random.key_data), KEYS[0]),
        TypeError,
        "  carry: key<fry>[] came in, uint32[2] came out",
    ),
    # What f returns, and takes
    "no pair": (
        lambda: scan(lambda carry, x: carry + x),
        TypeError,
        "f must return a pair `(carry, y)`, but it returned f32[]. If "
        "there is nothing to stack, return `(carry, None)`.",
    ),
    "three results": (
        lambda: scan(lambda carry, x: (carry, x, x)),
        TypeError,
        "f must return a pair `(carry, y)`, but it returned a tuple of 3, (0.0, f32[], "
        "f32[]). To stack several things, return `(carry, (a, b))`.",
    ),
    "None returned": (
        lambda: scan(lambda carry, x: None),
        TypeError,
        "f must return a pair `(carry, y)`, but it returned None.",
    ),
    "arity": (
        lambda: scan(lambda carry: (carry, None)),
        TypeError,
        "takes 1 positional argument but 2 were given",
    ),
    "f takes no key": (
        lambda: scan(key=KEYS[0]),
        TypeError,
        "got an unexpected keyword argument 'key'",
    ),
    "f wants a key": (
        lambda: scan(lambda carry, x, *, key: (carry, x)),
        TypeError,
        "missing 1 required keyword-only argument: 'key'",
    ),
    # Lengths
    "lengths disagree": (
        lambda: scan(xs={"a": XS, "b": (jnp.ones(5), "static")}),
        ValueError,
        "CheckpointedScan: these lengths must all be the same:\n  xs['a']: 4\n  "
        "xs['b'][0]: 5\nCheck the axes. A leaf whose axis is None is passed whole.",
    ),
    "length disagrees": (
        lambda: scan(length=3),
        ValueError,
        "these lengths must all be the same:\n  length: 3\n  xs: 4\nCheck the axes, "
        "or leave out `length`. A leaf whose axis is None is passed whole.",
    ),
    "layers disagree with xs": (
        lambda: scan(
            eqx.Partial(lambda w, c, x: (c, w), ZEROS), f_axes=eqx.if_array(0)
        ),
        ValueError,
        "  f.args[0]: 3\n  xs: 4\n",
    ),
    "no length": (
        lambda: scan(xs=None),
        ValueError,
        "no leaf is scanned over, so the number of steps is unknown: pass `length=`.",
    ),
    "an iterator": (
        lambda: scan(xs={"rows": iter([1.0, 2.0])}, length=2),
        TypeError,
        "`xs` must be arrays, along which the loop goes, and not an iterator:\n"
        "  xs['rows']: <list_iterator object at ",
    ),
    "negative length": (
        lambda: scan(xs=None, length=-1),
        ValueError,
        "`length` must be at least 0, but it is -1.",
    ),
    "boolean length": (
        lambda: scan(xs=None, length=True),
        TypeError,
        "`length` must be an int, not the bool True.",
    ),
    "length in a string": (
        lambda: scan(xs=None, length="3"),
        TypeError,
        "parameter 'length'.\nActual value: '3'",
    ),
    "traced length": (
        lambda: jax.jit(lambda n: scan(xs=None, length=n))(3),
        TypeError,
        "`length` must be an int that is known when tracing, but it is int32[]",
    ),
    # Axes
    "axis out of range": (
        lambda: scan(xs={"a": jnp.ones((4, 2))}, in_axes={"a": 2}),
        ValueError,
        "in_axes['a'] gives axis 2 for xs['a'], which is float32[4,2] and has the axes "
        "-2 to 1. Give it an axis that it has, or None.",
    ),
    "axis of a number": (
        lambda: scan(xs=jnp.ones(())),
        ValueError,
        "in_axes gives axis 0 for xs, which is float32[] and has no axis.",
    ),
    "axis out of range in ys": (
        lambda: scan(out_axes=-2),
        ValueError,
        "out_axes gives axis -2 for ys, which is float32[] and has the axes -1 to 0.",
    ),
    "axis out of range in f": (
        lambda: scan(without_key(eqx.nn.Linear, 2, 2), f_axes=3),
        ValueError,
        "f_axes gives axis 3 for f.weight, which is float32[2,2]",
    ),
    "no prefix of xs": (
        lambda: scan(xs=(XS, XS), in_axes=[0, 0]),
        ValueError,
        "in_axes=[0, 0] is not a prefix of xs",
    ),
    "no prefix of ys": (
        lambda: scan(out_axes=(0, 0)),
        ValueError,
        "out_axes=(0, 0) is not a prefix of ys",
    ),
    "no axis": (
        lambda: scan(in_axes="0"),
        TypeError,
        "in_axes must be an int, None, or a callable from a leaf to either, but for xs "
        "it is '0', of type str.",
    ),
    "outputs that vary are not stacked": (
        lambda: scan(
            lambda c, x: (c, {"a": x, "b": jnp.ones(2), "c": [c + 1]}), out_axes=None
        ),
        ValueError,
        "out_axes gives None for outputs that depend on the carry, on x or on the key, "
        "and so differ from step to step:\n  ys['a']\nGive them an int, the axis along "
        "which they are to be stacked.",
    ),
    "outputs that vary with the key": (
        lambda: scan(
            lambda c, x, key: (c, jax.random.normal(key)), out_axes=None, key=KEYS[0]
        ),
        ValueError,
        "differ from step to step:\n  ys\n",
    ),
    # Keys
    "many keys": (
        lambda: scan(key=KEYS),
        ValueError,
        "`key` must be one key, which is split for the steps, but it is key<fry>[3]. "
        "To give each step a key of your own, pass the keys in `xs`.",
    ),
    "many keys of the old style": (
        lambda: scan(key=jax.random.key_data(KEYS)),
        ValueError,
        "`key` must be one key, which is split for the steps, but it is uint32[3,2].",
    ),
    "no key": (
        lambda: scan(key=0),
        TypeError,
        "parameter 'key'.\nActual value: 0",
    ),
    "a key of floats": (
        lambda: scan(key=ZEROS),
        TypeError,
        "parameter 'key'.\nActual value: f32[3]",
    ),
    "the type of a key of floats": (
        lambda: el.Scan(keep).plan(
            0.0, XS, key=jax.ShapeDtypeStruct((3,), jnp.float32)
        ),
        TypeError,
        "Scan: `key` must be a PRNG key, as `jax.random.key(0)` makes it, not "
        "float32[3].",
    ),
    # Arguments
    "length by position": (
        lambda: el.Scan(keep)(0.0, XS, 4),
        TypeError,
        "Scan(init, xs=None, *, length=None, key=None): too many positional arguments.",
    ),
    "no init": (
        lambda: el.Scan(keep)(xs=XS),
        TypeError,
        "length=None, key=None): missing a required argument: 'init'.",
    ),
    "annotated f takes no key": (
        lambda: scan(annotated, key=KEYS[0]),
        TypeError,
        "annotated(carry, x): got an unexpected keyword argument 'key'.",
    ),
    # Settings
    "f is no function": (
        lambda: el.Scan(3),
        TypeError,
        "Scan: `f` must be callable, but 3 is not.",
    ),
    "f is forgotten": (
        lambda: el.CheckpointedScan(16),
        TypeError,
        "(Settings are given by keyword; `@CheckpointedScan(...)` without `f` is a "
        "decorator.)",
    ),
    "unknown setting": (
        lambda: el.Scan(keep, base=3),
        TypeError,
        "Scan has no setting 'base'. Its settings are: backward, f_axes, ",
    ),
    "positional setting": (
        lambda: el.Scan(keep, 0.0, XS),
        TypeError,
        "Scan(f): too many positional arguments. Pass settings by keyword, "
        "and call the result: `el.Scan(f)(init, xs)`.",
    ),
    "unroll": (
        lambda: el.Scan(keep, unroll=0),
        ValueError,
        "Scan: `unroll` must be at least 1, but it is 0. To unroll the whole loop, "
        "pass `unroll=True`.",
    ),
    "unroll of no int": (
        lambda: el.Scan(keep, unroll=1.5),
        TypeError,
        "Scan: `unroll` must be an int or a bool, not 1.5.",
    ),
    "reverse": (
        lambda: el.Scan(keep, reverse="yes"),
        TypeError,
        "Scan: `reverse` must be a bool, not 'yes'.",
    ),
    "split_keys": (
        lambda: el.Scan(keep, split_keys=2),
        TypeError,
        "Scan: `split_keys` must be a bool, not 2.",
    ),
    "f_transform": (
        lambda: el.Scan(keep, f_transform=3),
        TypeError,
        "Scan: `f_transform` must be a function from f to f, or None, not 3.",
    ),
    "schedule": (
        lambda: el.Scan(keep, schedule=16),
        TypeError,
        "Scan: `schedule` must be a schedule, such as `el.Recursive(16)`, not 16.",
    ),
    "schedule of bytes": (
        lambda: el.Scan(keep, schedule="512MB"),
        TypeError,
        "Scan: `schedule` must be a schedule, such as `el.Budget('512MB')`, not "
        "'512MB'.",
    ),
    "schedule not called": (
        lambda: el.Scan(keep, schedule=el.Recursive),
        TypeError,
        "`schedule` must be a schedule, such as `el.Recursive(16)`, not <class",
    ),
    "base": (
        lambda: el.CheckpointedScan(keep, base=1),
        ValueError,
        "`base` must be at least 2",
    ),
    "base of no int": (
        lambda: el.CheckpointedScan(keep, base="16"),
        TypeError,
        "`base` must be an int",
    ),
    "plan": (
        lambda: el.Scan(keep).plan(0.0, {"a": XS, "b": jnp.ones(5)}),
        ValueError,
        "Scan: these lengths must all be the same:\n  xs['a']: 4\n  xs['b']: 5\n",
    ),
    "policy": (
        lambda: el.Scan(keep, policy="save_dot"),
        ValueError,
        "save_dot",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_errors_in_f_say_what_was_being_traced():
    def f(carry, x):
        raise KeyError("mine")

    with pytest.raises(KeyError) as info:
        el.Scan(f)({"h": ZEROS, "s": "static"}, {"a": XS})
    note = "\n".join(info.value.__notes__)
    assert "This was raised while Scan traced `f(carry, x)` with" in note
    assert "carry = {'h': f32[3], 's': 'static'}" in note
    assert "x = {'a': f32[]}" in note


def test_the_error_is_that_of_arrays_if_f_fails_for_numbers_too():
    with pytest.raises(AttributeError, match=r"Tracer.* has no attribute"):
        el.Scan(lambda carry, x: carry.nonsense)(0.0, XS)


def test_errors_come_before_anything_runs():
    ran = []

    def f(carry, x):
        jax.debug.callback(ran.append, x)
        return carry.astype(int), x

    with pytest.raises(TypeError):
        el.Scan(f)(jnp.zeros(()), XS)
    jax.effects_barrier()
    assert ran == []
