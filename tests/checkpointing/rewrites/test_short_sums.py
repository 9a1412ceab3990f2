"""Products with a short vector, written as sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop._programs._calculus import run
from eqloop._programs._equations import equations
from eqloop.checkpointing.rewrites._short_sums import with_short_sums

WEIGHTS, ROWS = jnp.linspace(-1.0, 1.0, 7), jnp.linspace(0.3, 2.0, 84)
ROWS = jnp.sin(7.0 * ROWS).reshape(4, 7, 3)


def names(program):
    return [eqn.primitive.name for eqn in equations(program)]


def dot(a, b, axes, **settings):
    return jax.lax.dot_general(a, b, ((axes[:1], axes[1:]), ((), ())), **settings)


SUMS = {
    "vector first": lambda w, x: dot(w, x, (0, 1)),
    "vector last": lambda w, x: dot(x, w, (1, 0)),
    "further axes": lambda w, x: dot(w, jnp.stack([x, -x], 3), (0, 1)),
    "in a loop": lambda w, x: jax.lax.fori_loop(
        0, 3, lambda i, y: y + dot(w, x, (0, 1)), jnp.zeros((4, 3))
    ),
    "64 bits": lambda w, x: dot(w.astype("float64"), x.astype("float64"), (0, 1)),
}


@pytest.mark.parametrize("f", SUMS.values(), ids=SUMS)
def test_products_over_a_middle_axis_are_sums(f):
    with jax.enable_x64(f is SUMS["64 bits"]):
        program = jax.make_jaxpr(f)(WEIGHTS, ROWS)
        summed = with_short_sums(program)
        assert "dot_general" in names(program)
        assert "dot_general" not in names(summed)
        assert summed.out_avals == program.out_avals
        (found,), (expected,) = (run(p, WEIGHTS, ROWS) for p in (summed, program))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


OTHERS = {
    "first axis": lambda w, x: dot(w, x.swapaxes(0, 1), (0, 0)),
    "last axis": lambda w, x: dot(w, x.swapaxes(1, 2), (0, 2)),
    "long": lambda w, x: dot(jnp.tile(w, 3), jnp.tile(x, (1, 3, 1)), (0, 1)),
    "two vectors": lambda w, x: w @ w,
    "matrices": lambda w, x: dot(jnp.stack([w, w]), x, (1, 1)),
    "outer": lambda w, x: jnp.tensordot(w, x, 0),
    "all axes": lambda w, x: jnp.tensordot(x, x, 3),
    "batch": lambda w, x: jax.vmap(jnp.dot)(jnp.stack([w] * 4), x),
    "few bits": lambda w, x: dot(w.astype("bfloat16"), x.astype("bfloat16"), (0, 1)),
    "more bits": lambda w, x: dot(
        w.astype("bfloat16"),
        x.astype("bfloat16"),
        (0, 1),
        preferred_element_type=jnp.float32,
    ),
    "integers": lambda w, x: dot(w.astype(int), x.astype(int), (0, 1)),
}


@pytest.mark.parametrize("f", OTHERS.values(), ids=OTHERS)
def test_others_stay(f):
    program = jax.make_jaxpr(f)(WEIGHTS, ROWS)
    assert with_short_sums(program) is program


def test_a_size_that_is_not_known_stays():
    (count,) = jax.export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((count,), (4, count, 3))]
    program = jax.make_jaxpr(SUMS["vector first"])(*types)
    assert with_short_sums(program) is program


def test_the_stages_of_a_batch_are_summed():
    """The step of a batch is one of sums, and its gradient that of each example."""

    def end(y, weights):
        def stage(carry, w):
            i, y, rows = carry
            rows = rows.at[i].set(jnp.tanh(y))
            return (i + 1, y + w @ rows, rows), None

        init = jnp.asarray(0), y, jnp.zeros((3, 2))
        scan = el.Scan(stage, schedule=el.Binomial(2))
        return jnp.sum(scan(init, weights)[0][1])

    weights, ys = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3), jnp.ones((5, 2))
    ys = ys + jnp.arange(5.0)[:, None]
    ends = jax.vmap(end, (0, None))
    assert "dot_general" in names(jax.make_jaxpr(end)(ys[0], weights))
    assert "dot_general" not in names(jax.make_jaxpr(ends)(ys, weights))
    grad = jax.grad(lambda *inputs: jnp.sum(ends(*inputs)), (0, 1))

    @jax.jit
    def both():
        return [jax.grad(end, (0, 1))(y, weights) for y in ys], grad(ys, weights)

    own, (ct_ys, ct_weights) = both()
    np.testing.assert_allclose(ct_ys, jnp.stack([ct for ct, _ in own]), rtol=1e-5)
    np.testing.assert_allclose(ct_weights, sum(ct for _, ct in own), rtol=1e-5)
