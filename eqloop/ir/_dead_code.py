"""Dead code: what no output and no effect needs."""

import jax.extend.core as jex

from .._programs import (
    Rewrite,
    map_programs,
    rewritable_programs,
    with_equations,
    with_parts,
    without_dead_code,
)
from ._atoms import Closed, jaxpr_pass


def _eliminate(jaxpr: Closed, rewrite: Rewrite) -> Closed:
    eqns = [map_programs(eqn, rewrite) for eqn in jaxpr.eqns]
    jaxpr = with_equations(jaxpr, eqns)
    # JAX knows which operands a call needs for an output.
    live, _ = without_dead_code(jaxpr, keep=True)
    new = _with_used_constants(live)
    # It rebuilds all calls. If none became smaller, nothing has been eliminated.
    return new if _size(new) < _size(jaxpr) else jaxpr


@jaxpr_pass(_eliminate)
def eliminate_dead_code(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes what no output needs.

    It removes equations without effects, unneeded outputs and operands of calls,
    branches and loops (of `while` loops from JAX 0.12 on), and constants. Functions
    with custom derivatives keep theirs, since their derivatives may need them.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> def f(x):
        ...     unused = jnp.cos(x)
        ...     return jnp.sin(x)
        >>> ir.eliminate_dead_code(jax.make_jaxpr(f)(1.0))
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    ...


def _with_used_constants(jaxpr: Closed) -> Closed:
    readers = jaxpr.jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)
    used = {id(atom) for atoms in readers for atom in atoms}
    constants = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    kept = {var: const for var, const in constants if id(var) in used}
    return with_parts(jaxpr, constants=kept)


def _size(jaxpr: Closed) -> int:
    """Counts equations, and what they read and write."""
    return len(jaxpr.consts) + sum(
        1
        + len(eqn.invars)
        + sum(not isinstance(var, jex.DropVar) for var in eqn.outvars)
        + sum(map(_size, rewritable_programs(eqn)))
        for eqn in jaxpr.eqns
    )
