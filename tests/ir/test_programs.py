"""Programs made at random: what they compute is kept to the last bit."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from eqloop import ir
from eqloop.ir._atoms import count_equations

SPECIALS = jnp.array([0.0, -0.0, 1.0, -1.5, 3e38, jnp.inf, -jnp.inf, jnp.nan])
CONSTANTS = (0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), float("nan"))
UNARY = (
    jnp.negative,
    jnp.abs,
    jnp.floor,
    jnp.sign,
    lambda x: x[::-1],
    lambda x: x.reshape(2, 4),
    lambda x: x.reshape(4, 2).T,
    lambda x: x.astype(jnp.float16),
    lax.stop_gradient,
    jax.jit(lambda x: (x * 1.0) - 0.0),
)
BINARY = (jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum)

# An operation, and which of the values so far it is applied to.
unary = st.tuples(st.sampled_from(UNARY), st.integers(0, 9))
binary = st.tuples(st.sampled_from(BINARY), st.integers(0, 9), st.integers(0, 9))
programs = st.lists(unary | binary, min_size=3, max_size=12)


def run(program, x):
    values = [jnp.full(8, constant) for constant in CONSTANTS] + [x, CONSTANTS[3]]
    for f, *at in program:
        operands = [values[-1 - (i % len(values))] for i in at]
        operands = [jnp.ravel(x).astype(jnp.float32) for x in operands]
        operands = [jnp.broadcast_to(x, (8,)) if x.size == 1 else x for x in operands]
        values.append(f(*operands))
    return values[-3:]


# Evaluated one operation at a time, since XLA is not as careful: it may take x + 0.0
# for x.
@given(programs)
def test_random_programs_keep_every_bit(program):
    jaxpr = jax.make_jaxpr(lambda x: run(program, x))(SPECIALS)
    new = ir.optimize(jaxpr)
    jex.check_jaxpr(new.jaxpr)
    assert new.out_avals == jaxpr.out_avals
    assert count_equations(new) <= count_equations(jaxpr)
    found, expected = (
        jex.jaxpr_as_fun(ir.inline_jit(j))(SPECIALS) for j in (new, jaxpr)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        number = ~np.isnan(y)
        np.testing.assert_array_equal(np.signbit(x)[number], np.signbit(y)[number])
