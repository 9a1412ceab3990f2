"""What is wrong in JAX itself with its flags, each shown by plain JAX.

These tests expect the faults. One that fails says that JAX is mended: take it out, with
the tests that `EXPECTED` in `flags.py` lists for it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.custom_derivatives import SymbolicZero

from .flags import FAULTS, only_with_flags, turned_on

pytestmark = only_with_flags


def zeros_in_checkpoints() -> bool:
    """Forward mode makes zeros of the tangents of what is not differentiated."""

    @jax.custom_jvp
    def refuses(x: jax.Array) -> jax.Array:
        return x

    def rule(primals: Any, tangents: Any) -> Any:
        assert isinstance(tangents[0], SymbolicZero), "given a tangent"
        return primals[0], tangents[0]

    refuses.defjvp(rule, symbolic_zeros=True)
    f = jax.checkpoint(lambda x, y: x + refuses(y))
    try:
        jax.jit(lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (x,)))(1.0, 2.0)
    except AssertionError:
        return True
    return False


def numbers_in_rules() -> bool:
    """In a call, a forward rule is given constants as numbers, and not as arrays."""

    @jax.custom_vjp
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return x * n

    f.defvjp(lambda x, n: (x * n, jnp.zeros(n.shape)), lambda zero, ct: (ct, None))
    try:
        jax.jit(jax.grad(jax.jit(lambda x: f(x, jnp.asarray(3)))))(1.0)
    except AttributeError:
        return True
    return False


def policies_that_keep_everything() -> bool:
    """Such a policy is heeded only if it is `everything_saveable` itself."""

    def count(policy: Any) -> int:
        f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), policy=policy)
        return len(jax.tree.leaves(jax.vjp(jax.jit(f), 1.0)[1]))

    mine = lambda *_, **__: True
    return count(mine) != count(jax.checkpoint_policies.everything_saveable)


def tangents_beside_values_in_checkpoints() -> bool:
    """A checkpoint in a rule is not divided into what is known and what is linear."""

    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    both = jax.checkpoint(lambda x, t: (jnp.sin(x), jnp.cos(x) * t))
    f.defjvp(lambda primals, tangents: both(*primals, *tangents))
    try:
        jax.jit(jax.grad(f))(1.0)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(("name", "flag"), FAULTS.items())
def test_it_is_there_with_the_flag_alone(name: str, flag: str) -> None:
    is_there = globals()[name]
    with turned_on(()):
        assert not is_there()
    with turned_on((flag,)):
        assert is_there(), f"JAX {jax.__version__} has mended {name}"
