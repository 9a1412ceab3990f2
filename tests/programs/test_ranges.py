"""Ranges of integers, beside all values that there are."""

import itertools

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eqloop._programs._ranges import range_of_literal, range_of_result

# Functions of a boolean and of two integers between -2 and 3, with what is found.
FUNCTIONS = {
    "stage": (lambda p, a, b: jnp.where(p, 0, 1) + 6 < 7, (0, 1)),
    "certain stage": (lambda p, a, b: jnp.where(p, 0, 1) + 5 < 7, (1, 1)),
    "selected": (lambda p, a, b: jnp.where(p, a, 5), (-2, 5)),
    "known case": (lambda p, a, b: lax.select(a < 9, b, a + 100), (-2, 3)),
    "added": (lambda p, a, b: a + b, (-4, 6)),
    "subtracted": (lambda p, a, b: a - b, (-5, 5)),
    "multiplied": (lambda p, a, b: a * b, (-6, 9)),
    "clipped": (lambda p, a, b: lax.max(lax.min(a, 2), 0), (0, 2)),
    "wrapped": (lambda p, a, b: a.astype(jnp.int8) * jnp.int8(100), None),
    "compared": (lambda p, a, b: a >= 4, (0, 0)),
    "at most": (lambda p, a, b: a <= 3, (1, 1)),
    "greater": (lambda p, a, b: a + 6 > b, (1, 1)),
    "equal": (lambda p, a, b: a == 3, (0, 1)),
    "unequal": (lambda p, a, b: a != 4, (1, 1)),
    "same": (lambda p, a, b: jnp.where(p, 4, 4) == 4, (1, 1)),
    "neither": (lambda p, a, b: ~((a > 3) | (b > 3)), (1, 1)),
    "one of two": (lambda p, a, b: (a > 3) ^ (b < 4), (1, 1)),
    "both": (lambda p, a, b: p & (a < 4), (0, 1)),
    "converted": (lambda p, a, b: (a + 3).astype(bool), (1, 1)),
    "number": (lambda p, a, b: (a > 3).astype(int) + 1, (1, 1)),
    "repeated": (lambda p, a, b: jnp.any(jnp.broadcast_to(a > 3, (3,))), (0, 0)),
    "bits": (lambda p, a, b: lax.bitwise_or(a, b), None),
    "bits of all": (
        lambda p, a, b: lax.reduce_or(lax.broadcast(lax.max(a, 1), (2,)), (0,)),
        None,
    ),
    "every": (lambda p, a, b: jnp.all(jnp.broadcast_to(a < 4, (3,))), (1, 1)),
    "of no numbers": (lambda p, a, b: jnp.any(jnp.ones((0,), bool)), (0, 1)),
}


def range_of(program, ranges):
    """That of the result of a program, whose operands have these."""
    known = dict(zip(program.jaxpr.invars, ranges, strict=True))

    def read(atom):
        is_literal = isinstance(atom, jex.Literal)
        return range_of_literal(atom.val) if is_literal else known[atom]

    for eqn in program.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "jit":
            known[eqn.outvars[0]] = range_of(eqn.params["jaxpr"], operands)
        else:
            known[eqn.outvars[0]] = range_of_result(eqn, operands)
    return read(program.jaxpr.outvars[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ranges(name):
    f, found = FUNCTIONS[name]
    program = jax.make_jaxpr(f)(True, jnp.int32(0), jnp.int32(0))
    assert range_of(program, [(0, 1), (-2, 3), (-2, 3)]) == found
    if found is not None:
        every = [*itertools.product([False, True], range(-2, 4), range(-2, 4))]
        columns = [jnp.array(column) for column in zip(*every, strict=True)]
        values = np.asarray(jax.vmap(f)(*columns)).astype(int)
        assert found[0] <= values.min()
        assert values.max() <= found[1]


def test_nothing_is_known_of_other_numbers():
    program = jax.make_jaxpr(lambda x: (x + 1.0).astype(int))(0.5)
    assert range_of(program, [None]) is None
    assert range_of_literal(np.arange(3)) is None
