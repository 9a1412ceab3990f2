"""Sums over axes in a wider type, and casts whose value is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqloop._programs import equations, run, shared, vjp_of

WIDE = np.dtype("float32")
TYPES = [jax.ShapeDtypeStruct(shape, "float8_e4m3fn") for shape in [(2,), (300, 2)]]


def repeated(bias, rows):
    return jnp.broadcast_to(bias, rows.shape) * rows


def in_a_loop(bias, rows):
    step = lambda _, part: (None, repeated(bias, part))
    return jax.lax.scan(step, None, rows.reshape(2, 150, 2))[1].reshape(rows.shape)


def program(f, dtype="float8_e4m3fn"):
    return jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(t.shape, dtype) for t in TYPES))


def dtypes_of_sums(closed):
    eqns = equations(closed)
    sums = [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]
    return {str(eqn.invars[0].aval.dtype) for eqn in sums}


@pytest.mark.parametrize("f", [repeated, jax.jit(repeated), in_a_loop])
def test_sums_over_axes(f):
    marks = ((True, False),), ((True,),)
    narrow, wide = (vjp_of(program(f), *marks, sums) for sums in (None, WIDE))
    assert dtypes_of_sums(narrow) == {"float8_e4m3fn"}
    assert dtypes_of_sums(wide) == {"float32"}
    assert wide.out_avals == narrow.out_avals
    ones = [jnp.ones(t.shape, t.dtype) for t in (*TYPES, TYPES[1])]
    (total,) = run(wide, *ones)
    assert f is in_a_loop or total.tolist() == [288.0, 288.0]  # 300, rounded once
    assert total.tolist() != run(narrow, *ones)[0].tolist()


def test_what_is_wide_stays_as_it_is():
    closed = program(repeated, "float32")
    marks = ((True, False),), ((True,),)
    assert str(vjp_of(closed, *marks, WIDE)) == str(vjp_of(closed, *marks))


def cubed(x):
    # The derivatives are those of the original, whatever stands for it.
    given, own = shared([x, jnp.arange(3)], WIDE)
    again, _ = own(given)
    return again * again * x


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shared_arrays_are_what_they_were(dtype):
    x, push = jnp.asarray([1.5, -0.0, jnp.inf], dtype), jnp.ones(3, dtype)
    plain = lambda x: x * x * x

    def modes(f):
        first = lambda x: jax.jvp(f, (x,), (push,))[1]
        yield f(x)
        yield first(x)
        yield jax.jvp(first, (x,), (push,))[1]
        yield jax.vjp(f, x)[1](push)[0]
        yield jax.vjp(lambda x: jax.vjp(f, x)[1](push)[0], x)[1](push)[0]
        yield jax.vmap(first)(jnp.stack([x, 2 * x]))

    of_both = jax.jit(lambda: [list(modes(f)) for f in (cubed, plain)])()
    for found, expected in zip(*of_both, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_cotangents_of_shared_arrays_are_wide():
    given, own = shared([jnp.ones(3, "bfloat16")], WIDE)
    _, pull = jax.vjp(lambda given: own(given)[0], given)
    ((narrow, wide),) = pull(jnp.ones(3, "bfloat16"))
    assert (wide.dtype, wide.tolist()) == (WIDE, [1.0] * 3)
    assert not narrow.any()  # that of the original comes by way of the wide one
