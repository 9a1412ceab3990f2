"""Loops that a gradient runs past and does not need: as in JAX, nothing is refused."""

import functools

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close

stop = jax.lax.stop_gradient
A, B = jnp.float32(2.0), jnp.array([2.0, 3.0])


def far(a):
    return lambda x: jnp.abs(x * x - a) > 1e-4


def newton(a):
    return lambda x: (x + a / x) / 2


def root(a):
    return el.WhileLoop(far(a), newton(a))(a)


def root_of_jax(a):
    return jax.lax.while_loop(far(a), newton(a), a)


def with_rule(root):
    @jax.custom_jvp
    def function(a):
        return root(a)

    @function.defjvp
    def _(primals, tangents):
        value = function(*primals)
        return value, tangents[0] / (2 * value)

    return function


def scanned(schedule):
    def run(root, a):
        step = lambda c, _: (c * stop(root(c)), root(c))
        return el.Scan(step, schedule=schedule)(a, length=3)[0]

    return run


USES = {
    "stopped": lambda root, a: a * stop(root(a)),
    "beside": lambda root, a: jax.grad(lambda a: (a**2, root(a)), has_aux=True)(a)[0],
    "an integer": lambda root, a: a * root(a).astype(int).astype(a.dtype),
    "in a rule": lambda root, a: with_rule(root)(a),
    "residuals": lambda root, a: el.Remat(lambda a: a * stop(root(a)))(a),
    "linearized": lambda root, a: jax.linearize(lambda a: a * stop(root(a)), a)[1](a),
    "branch": lambda root, a: jax.lax.cond(a > 0, lambda: a * stop(root(a)), lambda: a),
    "batch": lambda root, a: jax.vmap(lambda b: b * stop(root(b)))(a * XS).sum(),
    "scan": lambda root, a: scanned(el.StoreAll())(root, a),
    "planned scan": lambda root, a: scanned(el.Recursive(2))(root, a),
    "while loop": lambda root, a: el.CheckpointedWhileLoop(
        lambda c: c < 20, lambda c: c * (1 + stop(root(c)))
    )(a),
}
XS = jnp.array([1.0, 2.0])


def test_as_in_jax():
    def both(root):
        uses = {name: functools.partial(use, root) for name, use in USES.items()}
        batches = {name: jax.vmap(jax.grad(jax.jit(f)))(B) for name, f in uses.items()}
        return {name: jax.grad(f)(A) for name, f in uses.items()}, batches

    assert_close(*(jax.jit(both, static_argnums=0)(r) for r in (root, root_of_jax)))


def test_outside_of_jit():
    slope = lambda root: jax.grad(lambda a: a * stop(root(a)))(A)
    assert_close(slope(root), slope(root_of_jax))


def test_a_cotangent_that_arrives_is_refused():
    with pytest.raises(ValueError, match="cannot be differentiated in reverse mode"):
        jax.grad(root)(A)
    with pytest.raises(ValueError, match="cannot be differentiated in reverse mode"):
        jax.grad(lambda a: jax.linearize(root, a)[1](a))(A)


def test_a_callback_of_a_loop_that_is_not_needed():
    def step(c, _):
        jax.experimental.io_callback(lambda: None, None, ordered=False)
        return c * 2, None

    run = lambda a: el.Scan(step, schedule=el.Recursive(2))(a, length=4)[0]
    assert jax.grad(lambda a: a * stop(run(a)))(A) == 32
    with pytest.raises(ValueError, match="io_callback"):
        jax.grad(run)(A)
