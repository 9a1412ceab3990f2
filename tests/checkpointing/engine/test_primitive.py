"""What a loop's derivatives meet beside plain arrays: odd leaves, zeros, effects."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import eqloop as el

from ...asserts import assert_close

pytestmark = pytest.mark.sampled

SCHEDULES = (el.Recursive(2), el.Binomial(2, block=2))
LENGTH = 7

schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def scan(schedule: Any) -> Callable[..., Any]:
    def loop(f: Any, init: Any, xs: Any = None, length: int | None = None) -> Any:
        return el.Scan(f, schedule=schedule)(init, xs, length=length)

    return loop


def assert_same(evaluate: Callable[..., Any], schedule: Any, *args: Any) -> None:
    """What is evaluated with a loop under a schedule is that of `jax.lax.scan`."""
    actual = jax.jit(functools.partial(evaluate, scan(schedule)))(*args)
    expected = jax.jit(functools.partial(evaluate, jax.lax.scan))(*args)
    assert_close(actual, expected, atol=1e-6)


US = jnp.cos(jnp.arange(LENGTH) * 0.9)


def test_leaves_that_are_not_differentiated():
    """Integers, booleans and keys, in consts, carry, xs and ys."""

    def step(w: Any, offset: Any, carry: Any, x: Any) -> Any:
        h, count, odd, key = carry
        u, i, key_of_step = x
        key, noise = jax.random.split(key)
        noise = jax.random.normal(noise) + jax.random.normal(key_of_step)
        h = jnp.sin(w * h + jnp.where(odd, u, noise) + (count * i).astype(float))
        count = (count + offset) % 5
        return (h, count, ~odd, key), (h * u, count, odd, key)

    def loss(loop: Any, w: Any, h: Any, us: Any, rest: Any) -> Any:
        offset, i, keys = rest
        init = (h, jnp.zeros((), int), jnp.asarray(True), keys[0])
        carry, ys = loop(lambda *args: step(w, offset, *args), init, (us, i, keys))
        return carry[0] + jnp.sum(ys[0] ** 2), (carry[1:], ys[1:])

    def evaluate(loop: Any, *args: Any) -> Any:
        loss_of = lambda *args: loss(loop, *args)
        return jax.value_and_grad(loss_of, (0, 1, 2), has_aux=True)(*args)

    rest = (
        jnp.asarray(2),
        jnp.arange(LENGTH),
        jax.random.split(jax.random.key(0), LENGTH),
    )
    w, h = jnp.asarray(0.9), jnp.asarray(0.2)
    assert_same(evaluate, el.Binomial(2, block=2), w, h, US, rest)


@schedules
def test_cotangents_of_integers_are_float0(schedule):
    def evaluate(loop: Any, h: Any, i: Any) -> Any:
        step = lambda h, i: (h * (1 + i).astype(float) / 5, None)
        run = lambda h, i: loop(step, h, i)[0]
        return jax.grad(run, (0, 1), allow_int=True)(h, i)

    h, i = jnp.asarray(0.5), jnp.arange(LENGTH)
    ours = evaluate(scan(schedule), h, i)
    theirs = evaluate(jax.lax.scan, h, i)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    assert ours[1].dtype == theirs[1].dtype == jax.dtypes.float0
    assert ours[1].shape == (LENGTH,)


@schedules
def test_complex_numbers(schedule):
    def evaluate(loop: Any, w: Any, h: Any, us: Any) -> Any:
        def run(w: Any, h: Any, us: Any) -> Any:
            step = lambda h, u: (jnp.sin(w * h + u), h * jnp.conj(w))
            return loop(step, h, us)

        def loss(*args: Any) -> Any:
            h, ys = run(*args)
            return jnp.abs(h) ** 2 + jnp.sum(jnp.real(ys * (1 - 2j)))

        args = (w, h, us)
        return jax.grad(loss, (0, 1, 2))(*args), jax.jvp(run, args, args)

    w, h = jnp.asarray(0.5 + 0.3j), jnp.asarray(0.2 - 0.4j)
    assert_same(evaluate, schedule, w, h, US)


@schedules
def test_cotangents_that_are_zero(schedule):
    def evaluate(loop: Any, *args: Any) -> Any:
        def loss(used: str, w: Any, h: Any, us: Any) -> Any:
            step = lambda c, u: ((jnp.sin(w * c[0] + u), c[1] * u), (c[1], c[0] * w))
            carry, ys = loop(step, (h, h), us)
            return {
                "carry": carry[0] * carry[1],
                "ys": jnp.sum(ys[0] * ys[1]),
                "neither": w * h,
                "one leaf of each": carry[1] + jnp.sum(ys[1]),
            }[used]

        used = ("carry", "ys", "neither", "one leaf of each")
        return {name: jax.grad(loss, (1, 2, 3))(name, *args) for name in used}

    assert_same(evaluate, schedule, jnp.asarray(0.9), jnp.asarray(0.2), US)


def test_tangents_of_a_batch_are_taken_back():
    """What they are tangents of is the same for all of them."""

    def evaluate(loop: Any, *args: Any) -> Any:
        def push(w: Any, h: Any, us: Any, tangent: Any) -> Any:
            run = lambda h: loop(lambda h, u: (jnp.sin(w * h + u), h), h, us)
            return jax.jvp(run, (h,), (tangent,))[1]

        of_batch = jax.vmap(functools.partial(push, *args))
        out, pull = jax.vjp(of_batch, jnp.arange(3.0))
        return out, pull(out)

    assert_same(
        evaluate, el.Binomial(2, block=2), jnp.asarray(0.9), jnp.asarray(0.2), US
    )


@schedules
def test_a_leaf_that_no_step_reads(schedule):
    """Its last value alone has a cotangent, and that goes to the last `x`."""

    def evaluate(loop: Any, *args: Any) -> Any:
        def loss(w: Any, h: Any, us: Any) -> Any:
            step = lambda c, u: ((jnp.sin(w * c[0] + u), jnp.cos(w * u)), None)
            carry, _ = loop(step, (h, h), us)
            return carry[1]

        return jax.grad(loss, (0, 1, 2))(*args)

    assert_same(evaluate, schedule, jnp.asarray(0.9), jnp.asarray(0.2), US)


@schedules
def test_only_one_input_is_differentiated(schedule):
    """Leaves of the carry come to depend on it, or never do."""

    def evaluate(loop: Any, *args: Any) -> Any:
        def loss(w: Any, h: Any, t: Any, us: Any) -> Any:
            def step(carry: Any, u: Any) -> Any:
                h, t, mean = carry
                return (jnp.sin(w * h + u * t), t + 0.1, mean + h / 7), (h, t)

            carry, ys = loop(step, (h, t, jnp.zeros(())), us)
            return sum(carry) + jnp.sum(ys[0] * ys[1])

        return [jax.value_and_grad(loss, argnum)(*args) for argnum in range(4)]

    args = (jnp.asarray(0.9), jnp.asarray(0.2), jnp.asarray(0.3), US)
    assert_same(evaluate, schedule, *args)


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize(
    "schedule", [el.Recursive(2), el.Chunked(3), el.Binomial(3)], ids=str
)
def test_very_short_loops(schedule, length):
    def evaluate(loop: Any, w: Any, us: Any) -> Any:
        def loss(w: Any, us: Any) -> Any:
            h, ys = loop(lambda h, u: (jnp.sin(w * h + u), h), w, us)
            return h + jnp.sum(ys)

        return jax.value_and_grad(loss, (0, 1))(w, us)

    assert_same(evaluate, schedule, jnp.asarray(0.9), US[:length])


@schedules
def test_loops_and_branches_in_the_step(schedule):
    def step(w: Any, h: Any, u: Any) -> Any:
        h = jax.lax.cond(u > 0, lambda h: jnp.sin(w * h), lambda h: h + w, h)
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.cos(h + u), h), h

    def evaluate(loop: Any, *args: Any) -> Any:
        def loss(w: Any, h: Any, us: Any) -> Any:
            h, ys = loop(lambda *args: step(w, *args), h, us)
            return h + jnp.sum(ys)

        return jax.grad(loss, (0, 1, 2))(*args)

    assert_same(evaluate, schedule, jnp.asarray(0.9), jnp.asarray(0.2), US)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -0.1, 0.1),))


@schedules
def test_custom_rules_in_the_step(schedule):
    def evaluate(loop: Any, h: Any, us: Any) -> Any:
        run = lambda h, us: loop(lambda h, u: (clipped(h + u), None), h, us)[0]
        return jax.grad(run, (0, 1))(h, us)

    assert_same(evaluate, schedule, jnp.asarray(0.2), US)


def test_a_custom_vjp_has_no_forward_mode_here_either():
    run = lambda h: scan(el.Binomial(3))(lambda h, _: (clipped(h), None), h, None, 7)[0]
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(run, (0.1,), (1.0,))


@schedules
def test_ordered_effects_come_in_order(schedule):
    seen: list[int] = []

    def note(place: np.ndarray) -> np.ndarray:
        seen.append(int(place))
        return place + 1

    def step(carry: Any, u: Any) -> Any:
        h, place = carry
        type_ = jax.ShapeDtypeStruct((), jnp.int32)
        return (jnp.sin(h + u), io_callback(note, type_, place, ordered=True)), h

    init = (jnp.asarray(0.1), jnp.zeros((), jnp.int32))
    jax.block_until_ready(jax.jit(lambda us: scan(schedule)(step, init, us))(US))
    jax.effects_barrier()
    assert seen == list(range(LENGTH))


@pytest.mark.parametrize("schedule", [el.Recursive(2), el.Binomial(2)], ids=repr)
def test_cotangents_may_be_literals(schedule):
    add = el.Scan(lambda total, _: (total + 1.0, None), schedule=schedule)
    loss = lambda x: add(2 * x, length=5)[0]
    assert jax.jit(jax.value_and_grad(loss))(1.0) == (7.0, 2.0)
