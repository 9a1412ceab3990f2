"""Numbers that JAX has marked with a dtype are numbers like those of Python.

Custom rules are given such numbers, and `jax.lax.stop_gradient(1.0)` returns one. Their
types are subclasses of `float`, `int` and `complex`.
"""

import enum
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop._arrays import describe, is_dynamic, is_scalar, same_static, unmarked

from .marks import slow

mark = jax.lax.stop_gradient

grow = lambda c: c * jnp.float32(1.5) + 1.0
is_small = lambda c: c < 20.0
step = lambda c, _: (grow(c), c)
key = jax.random.key(0)
holds = jnp.array(True)


class Level(enum.IntEnum):
    LOW = 1


class Metres(float):
    """A user's own subclass, which JAX does not know either."""


# What is done with a floating-point number.
USES: dict[str, Callable[[Any], Any]] = {
    "Scan": lambda x: el.Scan(step)(x, length=3),
    "CheckpointedScan": lambda x: el.CheckpointedScan(step)({"a": x}["a"], length=3),
    "a number that stays": lambda x: el.Scan(lambda c, _: (c, x))(x, length=3)[1],
    "a number that comes": lambda x: el.Scan(lambda c, _: (x, c))(0.0, length=3),
    "a number for an array": lambda x: el.Scan(lambda c, _: (x, c))(
        jnp.zeros(()), length=3
    ),
    "ForLoop": lambda x: el.ForLoop(lambda i: x)(jnp.arange(3)),
    "ScanWhile": lambda x: el.ScanWhile(is_small, step, max_steps=9)(x),
    "WhileLoop": lambda x: el.WhileLoop(is_small, grow)(x),
    "BoundedWhileLoop": lambda x: el.BoundedWhileLoop(is_small, grow, max_steps=9)(x),
    "CheckpointedWhileLoop": lambda x: el.CheckpointedWhileLoop(is_small, grow)(x),
    "Cond": lambda x: el.Cond(lambda: x, lambda: 3.0)(holds),
    "Cond, both": lambda x: el.Cond(lambda: x, lambda: 2.0)(holds),
    "Cond with an array": lambda x: el.Cond(lambda: x, lambda: jnp.float32(1))(holds),
    "Cond, operand": lambda x: el.Cond(grow, jnp.sin)(holds, x),
    "Switch": lambda x: el.Switch([lambda: 3.0, lambda: x])(mark(1)),
    "IfElse": lambda x: el.IfElse([lambda: x, lambda: 3.0])([holds, ~holds]),
    "Grad": lambda x: el.Grad(jnp.sin, return_value=True)(x),
    "VectorGrad": lambda x: el.VectorGrad(jnp.sin)(x),
    "ForwardGrad": lambda x: el.ForwardGrad(jnp.sin)(x, key=key),
    "JacRev": lambda x: el.JacRev(jnp.sin)(x),
    "JacFwd": lambda x: el.JacFwd(jnp.sin)(x),
    "Hessian": lambda x: el.Hessian(jnp.sin)(x),
    "a value": lambda x: el.Grad(lambda y: x)(1.0),
    "Jvp": lambda x: el.Jvp(jnp.sin)((x,), (x,)),
    "Vmap": lambda x: el.Vmap(lambda y: x, out_axes=0)(jnp.ones(3)),
    "ChunkedVmap": lambda x: el.ChunkedVmap(lambda y: x, 2, reduce="sum")(jnp.ones(3)),
    "unvmap": lambda x: el.unvmap(x, "max"),
    "Jit": lambda x: el.Jit(grow)(x),
    "ClipCotangent": lambda x: jax.grad(
        el.Scan(lambda c, _: (c * 3.0, None), backward=el.ClipCotangent(x)),
        has_aux=True,
    )(1.0, length=5),
}


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert is_dynamic(one) == is_dynamic(other)
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("use", [*USES])
def test_they_are_used_like_numbers(use):
    expected = USES[use](2.0)
    assert_same(USES[use](mark(2.0)), expected)

    # As custom rules are given them.
    in_vjp = jax.custom_vjp(USES[use])
    in_vjp.defvjp(lambda x: (in_vjp(x), None), lambda _, ct: (0.0,))
    in_jvp = jax.custom_jvp(USES[use])
    in_jvp.defjvp(lambda primals, tangents: (in_jvp(*primals), None))
    as_arrays = lambda tree: jax.tree.map(jnp.asarray, tree)
    assert_same(as_arrays(in_vjp(2.0)), as_arrays(expected))
    assert_same(as_arrays(in_jvp(2.0)), as_arrays(expected))


@pytest.mark.usefixtures("either_width")
def test_counters():
    def run(start):
        body = lambda c: (c[0] * c[2], c[1] + 1, c[2])
        loop = el.BoundedWhileLoop(lambda c: c[1] < 6, body, max_steps=9)
        return jax.grad(lambda w: loop((1.0, start, w))[0])(jnp.array(1.5))

    np.testing.assert_allclose(run(mark(2)), run(2), rtol=1e-6)
    np.testing.assert_allclose(run(mark(2)), 4 * 1.5**3, rtol=1e-6)


def test_complex_numbers():
    derive = el.Grad(lambda z: jnp.sin(z), holomorphic=True)
    np.testing.assert_allclose(derive(mark(1 + 2j)), derive(1 + 2j))


@pytest.mark.parametrize("number", [2, 2.5, 2j, slow(-0.0), slow(float("nan"))])
def test_they_are_the_same_values(number):
    marked = mark(number)
    assert is_scalar(marked)
    assert type(unmarked(marked)) is type(number)
    assert same_static(marked, number)
    assert same_static(number, marked)
    assert describe(marked) == describe(number)
    assert not same_static(marked, 7)
    assert not same_static(mark(2), 2.0)


@pytest.mark.parametrize("leaf", [Level.LOW, Metres(2.0), "a"])
def test_other_subclasses_stay_static(leaf):
    assert not is_scalar(leaf)
    assert unmarked(leaf) is leaf
    seen = []

    def f(carry, x):
        seen.append(carry[1])
        return (carry[0] + x, carry[1]), carry[1]

    (_, final), ys = el.Scan(f)((0.0, leaf), jnp.ones(3))
    assert final is ys is leaf
    assert all(x is leaf for x in seen)
    assert el.Cond(lambda: leaf, lambda: leaf)(holds) is leaf
    assert el.Vmap(lambda x: leaf, out_axes=0)(jnp.ones(3)) is leaf


def test_bools_stay_numbers_of_python():
    assert mark(True) is True
    (flag, _), _ = el.Scan(lambda c, _: (c, None))((True, 1.0), length=2)
    assert flag is True
    (flag, _), _ = el.Scan(lambda c, _: ((c[0] ^ holds, c[1]), None))(
        (True, 1.0), length=1
    )
    assert flag.dtype == bool
    assert not flag


@pytest.mark.parametrize(
    "scalar", [np.float32(2.0), jnp.bfloat16(2.0), mark(np.float32(2.0))]
)
def test_scalars_of_numpy_are_arrays(scalar):
    scan = el.Scan(lambda c, _: (c * scalar, c))
    carry, _ = scan(scalar, length=2)
    assert carry.dtype == scalar.dtype
    assert carry == 8
    assert el.Grad(lambda x: jnp.square(x))(scalar) == 4


def test_settings_may_be_such_numbers():
    assert el.Chunked(mark(3)) == el.Chunked(3)
    assert repr(el.Truncate(mark(3))) == repr(el.Truncate(3))
    program = el.ir.to_python(lambda x: x * mark(2.5) + mark(2))(jnp.ones(2))
    assert "Typed" not in program


def test_a_run_goes_on_from_the_same_number(tmp_path):
    def run(start, static):
        f = eqx.Partial(lambda s, c, x: (c + x, c * s), static)
        return el.Resumable(el.Scan(f), tmp_path, every=2)(start, jnp.ones(5))

    expected = run(1.0, 2.0)
    assert_same(run(mark(1.0), mark(2.0)), expected)
    with pytest.raises(ValueError, match="holds another run"):
        run(mark(1.0), mark(3.0))
