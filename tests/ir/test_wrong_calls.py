"""Wrong calls: each says where, what was wrong, and what to do."""

import jax
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop import ir

from ..asserts import assert_raises

X = jnp.ones(3)
JAXPR = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(X)
FIRST, SECOND = JAXPR.eqns
LARGE = np.ones((600, 600), np.float32)


def exported(look):
    """Calls a function with an array of a size that is not known."""
    (n,) = jax.export.symbolic_shape("n")
    jax.export.export(jax.jit(look))(jax.ShapeDtypeStruct((n, 2), jnp.float32))


@jax.jit
def written_while_tracing(c):
    ir.to_python(lambda x: x * c)(X)
    return c


CALLS = [
    (lambda: ir.optimize(jnp.sin), "TypeError: … `jax.make_jaxpr(f)(*args)`"),
    (
        lambda: ir.optimize(JAXPR, passes=ir.constant_fold),
        "TypeError: … write `passes=[constant_fold]`",
    ),
    (
        lambda: ir.Optimize(jnp.sin, passes=["fold"]),
        "TypeError: Optimize: `passes[0]` must be a function",
    ),
    (lambda: ir.eqns_to_jaxpr([JAXPR]), "TypeError: … `eqns[0]` is a"),
    (
        lambda: ir.eqns_to_jaxpr([FIRST, FIRST]),
        "ValueError: … `eqns[1]`, exp, computes a variable",
    ),
    (
        lambda: ir.eqns_to_jaxpr([SECOND], invars=[]),
        "ValueError: … operand 0 of `eqns[0]`, sin, is neither computed before it",
    ),
    (
        lambda: ir.eqns_to_jaxpr([SECOND, FIRST], invars=JAXPR.jaxpr.invars),
        "ValueError: … add its equation before this one",
    ),
    (
        lambda: ir.eqns_to_jaxpr([FIRST], outvars=SECOND.outvars),
        "ValueError: … `outvars[0]` is neither computed",
    ),
    (
        lambda: ir.eqns_to_closed_jaxpr(JAXPR.eqns, consts=[1.0]),
        "ValueError: … 0 `constvars` but 1 `consts`",
    ),
    (lambda: ir.to_python(JAXPR), "TypeError: … there is `jaxpr_to_python`"),
    (lambda: ir.jaxpr_to_python(jnp.sin), "TypeError: … jaxpr_to_python: expected"),
    (lambda: ir.jaxpr_to_python(JAXPR, "a b"), "ValueError: … but it is 'a b'"),
    (
        lambda: ir.to_python(lambda x: x + jnp.asarray(LARGE)[:3, 0])(X),
        "ValueError: … float32[600,600] of 1440000 bytes",
    ),
    (lambda: written_while_tracing(2.0), "ValueError: … call `to_python` outside"),
    (
        lambda: ir.to_python(lambda x: jax.pure_callback(np.sin, x, x))(X),
        "ValueError: … `eqloop.ir.register_handler('pure_callback', handler)`",
    ),
    (
        lambda: exported(lambda x: ir.to_python(jnp.sin)(x)),
        "ValueError: … `x` is float32[n,2], of a symbolic size",
    ),
    (
        lambda: exported(lambda x: ir.jaxpr_to_python(jax.make_jaxpr(jnp.sin)(x))),
        "ValueError: … call `to_python` with such, outside of what is exported",
    ),
    (lambda: ir.draw(JAXPR), "TypeError: … there are `to_dot` and `to_pydot`"),
    (
        lambda: ir.draw(jnp.sin)(X).save("sine.jpeg"),
        "ValueError: … must end in one of .pdf, .png, .svg, .dot, .txt",
    ),
]


@pytest.fixture(autouse=True)
def no_handlers(monkeypatch):
    monkeypatch.setattr("eqloop.ir.codegen._handlers._registered", {})


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_wrong_calls(call, said):
    assert_raises(call, said)


@pytest.mark.skipif(
    issubclass(jex.Jaxpr, jex.ClosedJaxpr), reason="all jaxprs are closed in JAX 0.12"
)
def test_a_jaxpr_that_is_not_closed():
    with pytest.raises(TypeError, match="close it, `jax"):
        ir.optimize(JAXPR.jaxpr)


def test_a_handler_that_returns_no_text():
    ir.register_handler("sin", lambda eqn, operands: None)
    with pytest.raises(
        TypeError, match="registered for `sin` must return an expression"
    ):
        ir.to_python(jnp.sin)(X)
