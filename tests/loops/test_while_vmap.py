"""A batch of while loops, in which every example stops at its own time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes

pytestmark = pytest.mark.sampled

LOOPS = {
    "bounded": functools.partial(el.BoundedWhileLoop, max_steps=70, base=4),
    "checkpointed": functools.partial(el.CheckpointedWhileLoop, checkpoints=5),
}
kinds = pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)

# Example i takes i steps, in an order without rhyme or reason.
STEPS = jnp.asarray(np.random.default_rng(0).permutation(64))
SCALES = 1 + jnp.arange(64.0) / 64
P = {"shared": jnp.array([0.7, 0.2]), "unused": jnp.ones(3)}


def run(kind, p, left, scale):
    """`body` is singular where the loop stops, and so is its derivative in `p`.

    Where `left` is 0, `sqrt` has an infinite derivative, and `1 / left` is infinite.
    """

    def body(carry):
        left, x = carry
        decay = p["shared"][0] * jnp.sqrt(left) * scale + p["shared"][1] / left
        return left - 1, jnp.sin(x + decay)

    return kind(lambda carry: carry[0] > 0, body)((left, jnp.ones(2) * scale))


def by_hand(p, steps, scale):
    """The same in a Python loop."""
    x = jnp.ones(2) * scale
    for left in range(steps, 0, -1):
        decay = p["shared"][0] * left**0.5 * scale + p["shared"][1] / left
        x = jnp.sin(x + decay)
    return x


def total(one, p, left, scale):
    return jnp.sum(jax.vmap(one, (None, 0, 0))(p, left, scale)[1] ** 2)


def masked(p, left, scale):
    """The same in plain JAX: 64 steps, of which those that are not run do nothing."""

    def step(carry, _):
        left, x = carry
        runs = left > 0
        left = jnp.where(runs, left, 1)  # no derivative is infinite
        decay = p["shared"][0] * jnp.sqrt(left) * scale + p["shared"][1] / left
        return (left - 1, jnp.where(runs, jnp.sin(x + decay), x)), None

    return jax.lax.scan(step, (left, jnp.ones(2) * scale), length=64)[0]


@functools.cache
def separately():
    """Values and gradients of 64 loops, each by itself."""
    loss = lambda *args: jnp.sum(masked(*args)[1] ** 2)
    each = jax.vmap(jax.value_and_grad(loss, (0, 1, 2)), (None, 0, 0))
    return jax.jit(each)(P, STEPS.astype(float), SCALES)


check = functools.partial(assert_close, rtol=2e-4, atol=2e-4)


def test_separate_loops_are_what_they_should_be():
    values, (ct_p, _, ct_scale) = separately()
    at = lambda i: lambda ct: ct[i]
    for i in (int(jnp.argmax(steps == STEPS)) for steps in (0, 2, 5)):
        steps = int(STEPS[i])
        loss = lambda p, scale, steps=steps: jnp.sum(by_hand(p, steps, scale) ** 2)
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(P, SCALES[i])
        check(values[i], value)
        check((jax.tree.map(at(i), ct_p), ct_scale[i]), grads)


@kinds
def test_values_and_gradients_are_those_of_64_loops(kind):
    loss = functools.partial(total, functools.partial(run, kind))
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(
        P, STEPS.astype(float), SCALES
    )
    values, (ct_p, ct_left, ct_scale) = separately()
    check(value, values.sum())
    check(grads, (jax.tree.map(lambda ct: ct.sum(0), ct_p), ct_left, ct_scale))


@kinds
def test_gradient_of_each_example_by_itself(kind):
    loss = lambda *args: jnp.sum(run(kind, *args)[1] ** 2)
    grads = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), (None, 0, 0)))
    check(grads(P, STEPS.astype(float), SCALES), separately()[1])


def test_forward_mode():
    """Tangents are those of finite differences: no derivative of the engine's."""
    run_all = jax.vmap(functools.partial(run, el.WhileLoop), (None, 0, 0))
    scales, dot = SCALES[:9], jnp.cos(jnp.arange(9.0))
    left = jnp.arange(9.0)
    along = jax.jit(lambda t: run_all(P, left, scales + t * dot)[1])
    value, slope = jax.jit(lambda: jax.jvp(along, (0.0,), (1.0,)))()
    check(value, along(0.0))
    difference = (along(1e-2) - along(-1e-2)) / 2e-2
    np.testing.assert_allclose(slope, difference, rtol=1e-2, atol=1e-2)


def test_second_derivatives_do_not_leak():
    run_one = functools.partial(run, LOOPS["checkpointed"])
    left, scales = jnp.array([0.0, 3.0, 1.0]), SCALES[:3]
    batched = lambda p: total(run_one, {**P, "shared": p}, left, scales)

    def one_by_one(p):
        p = {**P, "shared": p}
        pairs = zip((0, 3, 1), scales, strict=True)
        return sum(jnp.sum(by_hand(p, n, scale) ** 2) for n, scale in pairs)

    found, expected = (
        jax.jit(jax.hessian(f))(P["shared"]) for f in (batched, one_by_one)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@kinds
def test_none_of_the_examples_runs(kind):
    loss = functools.partial(total, functools.partial(run, kind))
    grads = jax.jit(jax.grad(loss, (0, 2)))(P, jnp.zeros(3), SCALES[:3])
    check(grads, (jax.tree.map(jnp.zeros_like, P), 4 * SCALES[:3]))


def test_vmap_of_vmap():
    one = functools.partial(run, LOOPS["checkpointed"])
    left, scales = STEPS[:6].reshape(2, 3).astype(float), SCALES[:3]

    def nested(p, left, scales):
        rows = jax.vmap(one, (None, 0, 0))
        return jnp.sum(jax.vmap(rows, (None, 0, None))(p, left, scales)[1] ** 2)

    flat = functools.partial(total, masked)
    ct_p, ct_scale = jax.jit(jax.grad(nested, (0, 2)))(P, left, scales)
    args = (P, left.ravel(), jnp.tile(scales, 2))
    same_p, same_scale = jax.jit(jax.grad(flat, (0, 2)))(*args)
    check((ct_p, ct_scale), (same_p, same_scale.reshape(2, 3).sum(0)))


@kinds
def test_carry_alone_is_batched_where_the_condition_is_not(kind):
    """All stop together, so nothing is selected."""

    def loop(x):
        body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
        return kind(lambda carry: carry[0] < 5, body)((0, x))[1]

    xs = jnp.linspace(0.1, 1, 4)
    jaxpr = str(jax.make_jaxpr(jax.vmap(loop))(xs))
    assert "select_n" not in jaxpr
    sin_5 = lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(5), x)
    check(*(jax.jit(jax.vmap(jax.grad(f)))(xs) for f in (loop, sin_5)))


def test_what_the_step_keeps_apart_may_be_of_any_kind():
    def body(carry):
        key, count, is_odd, x = carry
        key, sub = jax.random.split(key)
        return key, count - 1, ~is_odd, x * (1 + jax.random.uniform(sub))

    loop = el.BoundedWhileLoop(lambda carry: carry[1] > 0, body, max_steps=9)
    keys = jax.random.split(jax.random.key(0), 4)
    counts = jnp.arange(4)

    def one(key, count, x):
        return loop((key, count, jnp.array(False), x))

    xs = jnp.ones(4)
    one_by_one = jax.jit(one)
    out = jax.jit(jax.vmap(one))(keys, counts, xs)
    ct = jax.jit(jax.vmap(jax.grad(lambda *args: one(*args)[3], 2)))(keys, counts, xs)
    for i in range(4):
        key, count, is_odd, x = one_by_one(keys[i], counts[i], xs[i])
        assert (
            jax.random.key_data(key).tolist() == jax.random.key_data(out[0][i]).tolist()
        )
        assert (int(count), bool(is_odd)) == (0, bool(i % 2))
        np.testing.assert_allclose(ct[i], x, rtol=1e-6)


@kinds
def test_shared_parameters_have_one_gradient(kind):
    """Not one for each example, which would be added up in the end."""
    size, width = 256, 64

    def gradient(weight, xs, counts):
        def one(x, count):
            body = lambda carry: (carry[0] - 1, jnp.tanh(weight @ carry[1]))
            return kind(lambda carry: carry[0] > 0, body)((count, x))[1]

        return jax.grad(lambda w: jnp.sum(jax.vmap(one)(xs, counts)))(weight)

    gradient = lambda weight, xs, counts, f=gradient: f(weight, xs, counts)
    args = (jnp.eye(width), jnp.ones((size, width)), jnp.arange(size) % 9)
    # 256 gradients would take 4 MiB.
    assert temp_bytes(jax.tree_util.Partial(gradient), *args) < 2**21


def test_a_batch_of_gradients_that_stop_together_stores_what_one_loop_does():
    """There are slots for each example, and one table of where they are."""

    def loss(h):
        body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
        init = (jnp.zeros((), int), h)
        loop = el.CheckpointedWhileLoop(lambda c: c[0] < 40, body, checkpoints=5)
        return jnp.sum(loop(init)[1])

    hs = jnp.sin(jnp.arange(1.0, 7.0)).reshape(3, 2)
    batch = jax.jit(jax.vmap(jax.grad(loss))).lower(hs).compile()
    check(batch(hs), jnp.stack(list(map(jax.jit(jax.grad(loss)), hs))))
    assert "s32[3,5]" not in batch.as_text()  # where the carries of an example are
