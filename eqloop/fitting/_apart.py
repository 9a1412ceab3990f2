"""Keeps what is run again on the way back apart from what was run before.

XLA merges two computations that are the same, and then keeps the results of the first
until the second would have run. The barriers of `jax.checkpoint` prevent that, but some
versions of XLA drop them. There, what runs again is put into a branch.
"""

from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import instantiated, zero_tangent
from .._compat import drops_barriers, form_of
from .._programs import Rewriter, alone, run
from .._types import PyTree, Value


def kept_apart(pull: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """A function that takes cotangents back, and runs parts again at its own time."""
    if not drops_barriers():
        return pull

    def apart(cts: list[Value]) -> PyTree:
        program, types = jax.make_jaxpr(pull, return_shape=True)(cts)
        rewriter = Rewriter(program)
        for eqn in program.jaxpr.eqns:
            eqn = rewriter.enter(eqn)
            if form_of(eqn) == "remat2":
                branch = jax.make_jaxpr(_in_a_branch(eqn))(*alone(eqn).in_avals)
                rewriter.inline(branch, eqn.invars, eqn.outvars)
            else:
                rewriter.eqns.append(eqn)
        outs = run(rewriter.result(), *cts)
        return jax.tree.unflatten(jax.tree.structure(types), outs)

    return apart


def _in_a_branch(eqn: jex.JaxprEqn) -> Callable[..., list[Value]]:
    """An equation in the branch of a condition that holds, which XLA does not know."""
    program = alone(eqn)
    zeros = lambda: instantiated(list(map(zero_tangent, program.out_avals)))

    def either(*inputs: Value) -> list[Value]:
        number = lax.rng_uniform(jnp.float32(0), jnp.float32(1), shape=())
        return lax.cond(
            number < jnp.float32(2),
            lambda *inputs: run(program, *inputs),
            lambda *_: zeros(),
            *inputs,
        )

    return either
