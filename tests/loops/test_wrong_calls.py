"""Wrong calls of the scans: each says where, what was wrong, and what to do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_raises
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


def unpacks(carry: Any, x: Any) -> Any:
    h, c = carry
    return (h, c), x


def maps(change: Any) -> Any:
    return lambda carry, x: (change(carry), x)


def scan(f: Any = keep, init: Any = 0.0, xs: Any = XS, **arguments: Any) -> Any:
    """A call, with its settings and its arguments mixed as they come."""
    call = {k: arguments.pop(k) for k in ("length", "key") if k in arguments}
    return el.CheckpointedScan(f, **arguments)(init, xs, **call)


KEYS = jax.random.split(jax.random.key(0), 3)
ZEROS = jnp.zeros(3)

WRONG = {
    # The carry
    "shape": (
        lambda: scan(becomes(State(jnp.zeros(4))), State(ZEROS)),
        "TypeError: CheckpointedScan: … carry.h: float32[3] … float32[4] … Return … "
        "structure",
    ),
    "dtype": (
        lambda: scan(maps(lambda n: n / 2), jnp.zeros((), jnp.int32)),
        "TypeError: CheckpointedScan: … carry: int32[] … float32[] … "
        "(cast it with .astype, or start from a float32)",
    ),
    "every leaf that differs": (
        lambda: scan(
            becomes({"a": [ZEROS, jnp.ones(2)], "b": jnp.ones(3, int)}),
            {"a": [ZEROS, ZEROS], "b": ZEROS},
        ),
        "TypeError: CheckpointedScan: … carry['a'][1]: float32[3] … float32[2] … "
        "carry['b']: float32[3] … int32[3] … "
        "(cast it with .astype, or start from an int32)",
    ),
    "a leaf more": (
        lambda: scan(becomes({"a": 0.0, "b": 0.0}), {"a": 0.0}),
        "TypeError: CheckpointedScan: … carry['b'] came out … not come in",
    ),
    "a leaf less": (
        lambda: scan(becomes({"a": 0.0}), {"a": 0.0, "b": ZEROS}),
        "TypeError: CheckpointedScan: … carry['b'] came in … not come out",
    ),
    "container": (
        lambda: scan(becomes({"a": [0.0, 0.0]}), {"a": (0.0, 0.0)}),
        "TypeError: CheckpointedScan: … carry['a']: tuple … 2 … list … 2",
    ),
    "an array for a tree": (
        lambda: scan(becomes((ZEROS,)), ZEROS),
        "TypeError: CheckpointedScan: … carry: float32[3] … tuple … 1",
    ),
    "static field": (
        lambda: scan(
            becomes(eqx.nn.Lambda(without_key(eqx.nn.Linear, 2, 3))),
            eqx.nn.Lambda(without_key(eqx.nn.Linear, 2, 4)),
        ),
        "TypeError: CheckpointedScan: … carry.fn: … static fields … Linear … "
        "carry.fn.out_features: 4 … 3",
    ),
    "None becomes an array": (
        lambda: scan(becomes(State(ZEROS, n=ZEROS)), State(ZEROS)),
        "TypeError: CheckpointedScan: … carry.n: None … float32[3]",
    ),
    "an array becomes None": (
        lambda: scan(becomes(State(None)), State(ZEROS)),
        "TypeError: CheckpointedScan: … carry.h: float32[3] … None",
    ),
    "a number becomes a vector": (
        lambda: scan(maps(lambda c: c + ZEROS), 0.0),
        "TypeError: CheckpointedScan: … carry: float32[] … float32[3]",
    ),
    "a number becomes a string": (
        lambda: scan(becomes("a"), 0.0),
        "ValueError: … carry: 0.0 … 'a'",
    ),
    "static leaf": (
        lambda: scan(becomes({"s": "b", "h": 0.0}), {"s": "a", "h": 0.0}),
        "ValueError: … carry['s']: 'a' … 'b' … Return",
    ),
    "key style": (
        lambda: scan(maps(jax.random.key_data), KEYS[0]),
        "TypeError: … carry: key<fry>[] … uint32[2]",
    ),
    # What f returns, and takes
    "no pair": (
        lambda: scan(lambda carry, x: carry + x),
        "TypeError: … pair `(carry, y)` … f32[] … nothing … `(carry, None)`",
    ),
    "three results": (
        lambda: scan(lambda carry, x: (carry, x, x)),
        "TypeError: … pair `(carry, y)` … tuple … 3, (0.0, f32[], f32[]) … "
        "`(carry, (a, b))`",
    ),
    "None returned": (
        lambda: scan(lambda carry, x: None),
        "TypeError: … pair `(carry, y)` … None",
    ),
    "arity": (
        lambda: scan(lambda carry: (carry, None)),
        "TypeError: CheckpointedScan: `f` … too many … `f(carry, x)`",
    ),
    "a carry that is taken apart": (
        lambda: scan(unpacks, ZEROS),
        "ValueError: CheckpointedScan: f takes … too many values … the carry … f32[3] "
        "… `h, c = carry` … pair",
    ),
    "a number that is taken apart": (
        lambda: scan(unpacks, jnp.zeros(())),
        "TypeError: CheckpointedScan: f takes … apart … the carry … f32[]",
    ),
    "a condition for a step": (
        lambda: el.ScanWhile(keep, lambda h, x: h > 0, max_steps=3)(1.0),
        "TypeError: ScanWhile: f must return a pair … `el.ScanWhile(cond, f,",
    ),
    "a schedule for a base": (
        lambda: el.CheckpointedScan(keep, el.Budget("1GiB")),
        "TypeError: CheckpointedScan: … `base` … `schedule=Budget(nbytes='1GiB')`",
    ),
    "f takes no key": (
        lambda: scan(key=KEYS[0]),
        "TypeError: CheckpointedScan: … `key` … f has no parameter `key` … (carry, x)",
    ),
    "f wants a key": (
        lambda: scan(lambda carry, x, *, key: (carry, x)),
        "TypeError: CheckpointedScan: f wants a `key` … `key=jax.random.key(0)`",
    ),
    # Lengths
    "lengths disagree": (
        lambda: scan(xs={"a": XS, "b": (jnp.ones(5), "static")}),
        "ValueError: CheckpointedScan: … xs['a']: 4 … xs['b'][0]: 5 … Check … axes … "
        "leaf … axis … None … whole",
    ),
    "length disagrees": (
        lambda: scan(length=3),
        "ValueError: … length: 3 … xs: 4 … Check … axes … `length` … leaf … axis … "
        "None … whole",
    ),
    "layers disagree with xs": (
        lambda: scan(
            eqx.Partial(lambda w, c, x: (c, w), ZEROS), f_axes=eqx.if_array(0)
        ),
        "ValueError: … f.args[0]: 3 … xs: 4",
    ),
    "no length": (
        lambda: scan(xs=None),
        "ValueError: … no leaf … number … unknown: … `length=`",
    ),
    "an iterator": (
        lambda: scan(xs={"rows": iter([1.0, 2.0])}, length=2),
        "TypeError: … `xs` … iterator: … xs['rows']: <list_iterator",
    ),
    "boolean length": (
        lambda: scan(xs=None, length=True),
        "TypeError: … `length` … int … bool True",
    ),
    "traced length": (
        lambda: jax.jit(lambda n: scan(xs=None, length=n))(3),
        "TypeError: … `length` … int … int32[]",
    ),
    # Axes
    "axis out of range": (
        lambda: scan(xs={"a": jnp.ones((4, 2))}, in_axes={"a": 2}),
        "ValueError: … in_axes['a'] … axis 2 … xs['a'] … float32[4,2] … axes -2 … "
        "1. Give … axis … None",
    ),
    "axis of a number": (
        lambda: scan(xs=jnp.ones(())),
        "ValueError: … in_axes … axis 0 … float32[] … no axis",
    ),
    "axis out of range in ys": (
        lambda: scan(out_axes=-2),
        "ValueError: … out_axes … axis -2 … float32[] … axes -1 … 0",
    ),
    "axis out of range in f": (
        lambda: scan(without_key(eqx.nn.Linear, 2, 2), f_axes=3),
        "ValueError: … f_axes … axis 3 … f.weight … float32[2,2]",
    ),
    "no prefix of xs": (
        lambda: scan(xs=(XS, XS), in_axes=[0, 0]),
        "ValueError: … in_axes=[0, 0] … prefix",
    ),
    "no prefix of ys": (
        lambda: scan(out_axes=(0, 0)),
        "ValueError: … out_axes=(0, 0) … prefix",
    ),
    "no axis": (
        lambda: scan(in_axes="0"),
        "TypeError: … in_axes … int, None … callable … leaf … '0'",
    ),
    "outputs that vary are not stacked": (
        lambda: scan(
            lambda c, x: (c, {"a": x, "b": jnp.ones(2), "c": [c + 1]}), out_axes=None
        ),
        "ValueError: … out_axes … None … depend … key … differ … ys['a'] … Give … "
        "int … axis",
    ),
    "outputs that vary with the key": (
        lambda: scan(
            lambda c, x, key: (c, jax.random.normal(key)), out_axes=None, key=KEYS[0]
        ),
        "ValueError: … out_axes … differ … ys",
    ),
    # Keys
    "many keys": (
        lambda: scan(key=KEYS),
        "ValueError: … `key` … key … key<fry>[3] … key … keys … `xs`",
    ),
    "many keys of the old style": (
        lambda: scan(key=jax.random.key_data(KEYS)),
        "ValueError: … `key` … key … uint32[3,2]",
    ),
    "the type of a key of floats": (
        lambda: el.Scan(keep).plan(
            0.0, XS, key=jax.ShapeDtypeStruct((3,), jnp.float32)
        ),
        "TypeError: Scan: `key` … PRNG key … `jax.random.key(0)` … float32[3]",
    ),
    # Arguments
    "length by position": (
        lambda: el.Scan(keep)(0.0, XS, 4),
        "TypeError: Scan(init, xs=None, *, length=None, key=None, log=None): … "
        "positional",
    ),
    "no init": (
        lambda: el.Scan(keep)(xs=XS),
        "TypeError: … length=None, key=None, log=None): missing … argument: 'init'",
    ),
    "annotated f takes no key": (
        lambda: scan(annotated, key=KEYS[0]),
        "TypeError: … `key` … f has no parameter `key` … (carry, x)",
    ),
    # Settings
    "f is forgotten": (
        lambda: el.CheckpointedScan(16),
        "TypeError: … (Settings … keyword; `@CheckpointedScan(...)` … `f`",
    ),
    "unknown setting": (
        lambda: el.Scan(keep, base=3),
        "TypeError: Scan … no setting 'base' … f_axes",
    ),
    "positional setting": (
        lambda: el.Scan(keep, 0.0, XS),
        "TypeError: Scan(f): … positional … Pass … keyword … `el.Scan(f)(init, xs)`",
    ),
    "unroll": (
        lambda: el.Scan(keep, unroll=0),
        "ValueError: Scan: `unroll` … least 1 … 0 … whole … `unroll=True`",
    ),
    "schedule": (
        lambda: el.Scan(keep, schedule=16),
        "TypeError: Scan: `schedule` … schedule … `el.Recursive(16)` … 16",
    ),
    "schedule of bytes": (
        lambda: el.Scan(keep, schedule="512MB"),
        "TypeError: Scan: `schedule` … schedule … `el.Budget('512MB')` … '512MB'",
    ),
    "schedule not called": (
        lambda: el.Scan(keep, schedule=el.Recursive),
        "TypeError: … `schedule` … schedule … `el.Recursive(16)` … <class",
    ),
    "base": (
        lambda: el.CheckpointedScan(keep, base=1),
        "ValueError: … `base` … least 2",
    ),
    "plan": (
        lambda: el.Scan(keep).plan(0.0, {"a": XS, "b": jnp.ones(5)}),
        "ValueError: Scan: … xs['a']: 4 … xs['b']: 5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_raises(*WRONG[name])


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
