"""Which programs can see the batch that they are run in."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop._programs import has_collectives, sees_batch

X, N = jnp.ones(3), jnp.arange(3)
KEY = jax.random.key(0, impl="threefry2x32")
RBG, UNSAFE = (jax.random.key(0, impl=impl) for impl in ("rbg", "unsafe_rbg"))
CELL = eqx.nn.GRUCell(3, 3, key=KEY)
ATTENTION = eqx.nn.MultiheadAttention(1, 3, key=KEY)
DROPOUT = eqx.nn.Dropout(0.5)


def seen(x: Any) -> Any:
    return x * el.unvmap(jnp.sum(x), "max")


def with_jvp(rule: Any) -> Any:
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda p, t: (f(*p), rule(*p) * t[0]))
    return f


def with_vjp(rule: Any) -> Any:
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (rule(x) * ct,))
    return f


def called(method: str) -> Any:
    return lambda x: jax.pure_callback(lambda x: x, x, x, vmap_method=method)


unknown = jex.Primitive("unknown")
unknown.def_abstract_eval(lambda x: x)
bits = lambda key: jax.random.normal(key, (3,))
scanned = lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]
looped = lambda f, **settings: el.Scan(lambda c, _: (f(c), None), **settings)

SEE = {
    "unvmap": (seen, X),
    "of one row": (lambda x: el.unvmap(x, "none"), X),
    "equinox": (lambda x: eqxi.unvmap_any(x > 0), X),
    "not to be batched": (eqxi.nonbatchable, X),
    "an error": (lambda x: eqx.error_if(x, x < 0, "below"), X),
    "an unknown primitive": (unknown.bind, X),
    "rbg": (bits, RBG),
    "unsafe_rbg": (bits, UNSAFE),
    "gamma": (lambda key: jax.random.gamma(key, 2.0), RBG),
    "raw": (lambda d: bits(jax.random.wrap_key_data(d, impl="rbg")), jnp.ones(4, "u4")),
    "bits": (lambda d: lax.rng_bit_generator(d, (3,)), jnp.ones(4, "u4")),
    "a callback": (called("broadcast_all"), X),
    "in a scan": (lambda x: scanned(seen, x), X),
    "in cond of a while": (
        lambda x: lax.while_loop(lambda c: seen(c)[0] < 3, lambda c: c + 1, x),
        X,
    ),
    "in a branch": (lambda x: lax.cond(x[0] > 0, seen, jnp.sin, x), X),
    "in a checkpoint": (jax.checkpoint(seen), X),
    "in jit": (jax.jit(seen), X),
    "in a loop": (lambda x: looped(seen, schedule=el.Recursive(2))(x, length=4), X),
    "in a map": (lambda x: el.ChunkedVmap(seen, 2)(x), X),
    "in Remat": (el.Remat(seen), X),
    "in a jvp rule": (with_jvp(seen), X),
    "in a vjp rule": (with_vjp(seen), X),
    "in a rule of a jvp rule": (with_jvp(with_jvp(seen)), X),
    "in a rule of a vjp rule": (with_vjp(with_jvp(seen)), X),
    "in a rule in a scan": (lambda x: scanned(with_vjp(seen), x), X),
}
SEE_NOT = {
    "GRU": (lambda x: CELL(x, x), X),
    "attention": (lambda x: ATTENTION(x[None], x[None], x[None]), X),
    "dropout": (lambda key: DROPOUT(X, key=key), KEY),
    "keys": (lambda key: jax.random.gamma(jax.random.split(key)[0], 2.0), KEY),
    "a key that is moved": (lambda key: jnp.stack([key, key])[0], RBG),
    "one by one": (jax.custom_batching.sequential_vmap(jnp.sin), X),
    "a callback one by one": (called("sequential"), X),
    "convolution": (lambda x: jnp.convolve(x, x), X),
    "a solve": (lambda x: jnp.linalg.solve(jnp.eye(3) + jnp.outer(x, x), x), X),
    "iterations": (lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x)[0], X),
    "a loop": (lambda x: looped(jnp.sin, schedule=el.Recursive(2))(x, length=4), X),
    "a jvp rule": (with_jvp(jnp.cos), X),
    "a vjp rule": (with_vjp(jnp.cos), X),
    "not to be differentiated": (eqxi.nondifferentiable, X),
    **{
        name: (getattr(jax.nn, name), X)
        for name in ("relu", "gelu", "silu", "softplus", "logsumexp", "softmax")
    },
}


@pytest.mark.parametrize("name", SEE)
def test_what_sees_its_batch(name):
    f, x = SEE[name]
    assert sees_batch(jax.make_jaxpr(f)(x))


@pytest.mark.parametrize("name", SEE_NOT)
def test_what_does_not(name):
    f, x = SEE_NOT[name]
    assert not sees_batch(jax.make_jaxpr(f)(x))


def test_a_rule_that_refuses_some_tangents_is_asked_for_the_others():
    f = jax.custom_jvp(lambda x, y: x + y)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        if not isinstance(tangents[1], jax.custom_derivatives.SymbolicZero):
            raise TypeError("only x has a derivative")
        return f(*primals), seen(primals[0]) * tangents[0]

    f.defjvp(rule, symbolic_zeros=True)
    assert sees_batch(jax.make_jaxpr(f)(X, X))


def test_what_is_trusted():
    program = jax.make_jaxpr(lambda x: eqxi.unvmap_any(x > 0))(X)
    assert not sees_batch(program, frozenset({"unvmap_any"}))


def test_collectives_of_a_map_and_of_a_mesh():
    total = lambda x: lax.psum(x, "rows")
    program = jax.make_jaxpr(total, axis_env=[("rows", 2)])(X)
    assert has_collectives(program)
    assert not sees_batch(program)
    nested = jax.make_jaxpr(lambda x: scanned(total, x), axis_env=[("rows", 2)])(X)
    assert has_collectives(nested)
    with jax.set_mesh(jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])):
        assert not has_collectives(program)
    assert not has_collectives(jax.make_jaxpr(jnp.sin)(X))
