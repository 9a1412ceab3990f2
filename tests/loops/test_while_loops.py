"""What while loops do with carries, conditions, parameters and bounds."""

import functools
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow

pytestmark = pytest.mark.sampled

LOOPS = {
    "while": el.WhileLoop,
    "bounded": functools.partial(el.BoundedWhileLoop, max_steps=40, base=3),
    "checkpointed": functools.partial(el.CheckpointedWhileLoop, checkpoints=4),
}
REVERSIBLE = {kind: LOOPS[kind] for kind in ("bounded", "checkpointed")}
every_kind = pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
reversible = pytest.mark.parametrize("kind", REVERSIBLE.values(), ids=REVERSIBLE)


class Decay(eqx.Module):
    rate: jax.Array
    activation: Any = jnp.tanh

    def __call__(self, carry):
        return {**carry, "h": self.activation(self.rate * carry["h"])}


class Above(eqx.Module):
    threshold: jax.Array

    def __call__(self, carry):
        return jnp.max(carry["h"]) > self.threshold


# The carry


@every_kind
def test_static_leaves_come_back_as_they_went_in(kind):
    init = {"h": jnp.ones(3), "name": "pole", "none": None, "f": jnp.sin, "order": 2}
    out = kind(Above(jnp.array(0.3)), Decay(jnp.array(0.9)))(init)
    static = {k: v for k, v in out.items() if k != "h"}
    assert static == {"name": "pole", "none": None, "f": jnp.sin, "order": 2}
    h = jnp.ones(3)
    while jnp.max(h) > 0.3:
        h = jnp.tanh(0.9 * h)
    np.testing.assert_allclose(out["h"], h, rtol=1e-6)


@every_kind
@pytest.mark.usefixtures("either_width")
def test_numbers_that_change_become_arrays(kind):
    body = lambda carry: (carry[0] + 1, carry[1], carry[2] / 2, not carry[3])
    loop = kind(lambda carry: carry[0] < 5, body)
    # `not` of an array fails, so this number has to stay as it is.
    with pytest.raises(jax.errors.TracerBoolConversionError):
        loop((0, 7, 32.0, False))
    body = lambda carry: (carry[0] + 1, carry[1], carry[2] / 2)
    count, seven, x = kind(lambda carry: carry[0] < 5, body)((0, 7, 32.0))
    assert (int(count), float(x)) == (5, 1.0)
    assert type(seven) is int


@every_kind
def test_a_flag_that_is_a_python_bool_may_be_the_condition(kind):
    body = lambda carry: {"left": carry["left"] - 1, "on": carry["left"] > 1}
    out = kind(lambda carry: carry["on"], body)({"left": 3, "on": True})
    assert int(out["left"]) == 0


def test_weak_types_are_promoted():
    body = lambda x: x * jnp.ones((), jnp.bfloat16) + jnp.ones((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert el.WhileLoop(lambda x: x < 3, body)(0.0).dtype == jnp.float32


@every_kind
def test_a_loop_of_no_steps_and_a_carry_of_no_leaves(kind):
    assert float(kind(lambda x: x > 0, lambda x: x - 1)(-1.5)) == -1.5
    assert kind(lambda _: jnp.array(False), lambda _: ())(()) == ()
    assert kind(lambda _: False, lambda x: x)("static") == "static"


@reversible
@pytest.mark.usefixtures("either_width")
def test_gradient_of_a_loop_of_no_steps(kind):
    loop = kind(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] * 0))
    assert float(jax.jit(jax.grad(lambda x: loop((0, x))[1]))(3.0)) == 1


# Bounds


@pytest.mark.parametrize("max_steps", [0, 1, slow(5), 17])
@pytest.mark.usefixtures("either_width")
def test_a_bound_returns_the_carry_as_it_is(max_steps):
    forever = lambda carry: True
    body = lambda x: x / 2
    bounded = el.BoundedWhileLoop(forever, body, max_steps=max_steps, base=4)
    checkpointed = el.CheckpointedWhileLoop(forever, body, max_steps=max_steps)
    few = el.CheckpointedWhileLoop(forever, body, max_steps=max_steps, checkpoints=2)

    @jax.jit
    def every(x):
        doubles = [lambda x, f=f: f(2 * x) for f in (bounded, checkpointed, few)]
        return [(double(x), jax.value_and_grad(double)(x)) for double in doubles]

    for primal, (value, slope) in every(1.0):
        assert (float(value), float(slope)) == (2 * 0.5**max_steps,) * 2
        assert primal == value


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 14, 30, 33])
def test_gradients_for_any_number_of_steps(steps):
    """One program for all of them: the number is an input."""
    for gradient, expected in zip(gradients(), by_hand(steps), strict=True):
        np.testing.assert_allclose(gradient(steps), expected, rtol=1e-4)


@functools.cache
def gradients():
    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]) * carry[1] + 0.3)

    def gradient(kind):
        def run(x, steps):
            return kind(lambda carry: carry[0] < steps, body)((0, x))[1]

        return jax.jit(jax.value_and_grad(run, 0)).lower(0.7, 1).compile()

    kinds = [
        functools.partial(el.CheckpointedWhileLoop, checkpoints=s) for s in (1, 2, 4)
    ]
    kinds += [functools.partial(el.BoundedWhileLoop, max_steps=33, base=3)]
    return [functools.partial(gradient(kind), 0.7) for kind in kinds]


def by_hand(steps):
    def run(x):
        for _ in range(steps):
            x = jnp.sin(x) * x + 0.3
        return x

    return [jax.value_and_grad(run)(0.7)] * 4


# Parameters


@reversible
def test_modules_and_closures_are_differentiated(kind):
    scale = jnp.array(1.1)

    def run(scale, model, h, threshold):
        body = lambda carry: model({"h": scale * carry["h"]})
        return kind(Above(threshold), body)({"h": h})["h"].sum()

    def reference(scale, model, h, threshold):
        while jnp.max(h) > threshold:
            h = model({"h": scale * h})["h"]
        return h.sum()

    args = (scale, Decay(jnp.array(0.7)), jnp.array([1.0, 0.4]), jnp.array(0.1))
    grads, expected = (
        eqx.filter_grad(lambda args, f=f: f(*args))(args) for f in (run, reference)
    )
    assert_close(grads, expected, rtol=1e-5, atol=0)


def test_a_loop_is_a_tree_and_a_layer():
    loop = el.BoundedWhileLoop(
        Above(jnp.array(0.3)), Decay(jnp.array(0.9)), max_steps=9
    )
    assert len(jax.tree.leaves(eqx.filter(loop, eqx.is_array))) == 2
    loop = eqx.tree_at(lambda loop: loop.body.rate, loop, jnp.array(0.5))
    grads = eqx.filter_grad(lambda loop: loop({"h": jnp.ones(2)})["h"].sum())(loop)
    assert float(grads.body.rate) != 0
    assert float(grads.cond.threshold) == 0
    assert "max_steps=9" in repr(loop)


@reversible
def test_the_condition_need_not_be_differentiable(kind):
    def cond(x):
        small = jax.ShapeDtypeStruct((), bool)
        return jax.pure_callback(lambda x: np.asarray(x > 1), small, x)

    halve = kind(cond, lambda x: x / 2)
    assert float(jax.jit(jax.grad(halve))(5.0)) == 0.125
    assert float(jax.jit(lambda x: jax.jvp(halve, (x,), (1.0,))[1])(5.0)) == 0.125


# Memory


def gradient(loop, width):
    """That of 30 steps, of which the carry and nothing else is stored."""
    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    run = lambda h: jnp.sum(loop(lambda c: c[0] < 30, body, (jnp.int32(0), h))[1])
    return temp_bytes(jax.grad(run), jnp.ones(width))


def carries(loop):
    """How many carries a gradient holds at once, its other buffers not counted."""
    widths = 1000, 3000
    small, large = (gradient(loop, width) for width in widths)
    return (large - small) / (4 * (widths[1] - widths[0]))


@pytest.mark.parametrize(("max_steps", "base"), [(256, 16), (4096, 16), (4096, 4)])
def test_memory_of_bounded_loops(max_steps, base):
    run = lambda cond, body, init: el.BoundedWhileLoop(
        cond, body, max_steps=max_steps, base=base
    )(init)
    slots = base * round(np.log(max_steps) / np.log(base))
    assert slots <= carries(run) <= slots + 5


@pytest.mark.parametrize("slots", [8, 64])
def test_memory_of_checkpointed_loops(slots):
    run = lambda cond, body, init: el.CheckpointedWhileLoop(
        cond, body, checkpoints=slots
    )(init)
    assert slots <= carries(run) <= slots + 6


@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
def test_no_more_memory_than_equinox(kind):
    theirs = functools.partial(eqxi.while_loop, kind=kind, max_steps=4096)

    def ours(cond, body, init):
        loop = {
            "bounded": el.BoundedWhileLoop,
            "checkpointed": el.CheckpointedWhileLoop,
        }
        return loop[kind](cond, body, max_steps=4096)(init)

    assert gradient(ours, 1000) <= gradient(theirs, 1000)


def test_default_slots():
    """As many as evaluate each of `max_steps` steps at most three times."""
    for max_steps in (1, 2, 3, 5, 6, 100, 4096):
        loop = el.CheckpointedWhileLoop(lambda c: c, lambda c: c, max_steps=max_steps)
        slots = loop._planner().checkpoints
        assert slots * (slots + 3) // 2 >= max_steps
        assert slots == 1 or (slots - 1) * (slots + 2) // 2 < max_steps
