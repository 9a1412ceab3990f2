"""Dead code: what no output and no effect needs."""

import jax.core
import jax.extend.core as jex

from .._arrays import pick, split, union
from .._programs import (
    Rewrite,
    inputs_read,
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
    new = _with_used_constants(_live(jaxpr))
    # JAX rebuilds all calls. If none became smaller, nothing has been eliminated.
    return new if _size(new) < _size(jaxpr) else jaxpr


@jaxpr_pass(_eliminate)
def eliminate_dead_code(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes what no output needs.

    It removes equations without effects, unneeded outputs and operands of calls,
    branches and loops, and constants. Functions with custom derivatives keep theirs,
    since their derivatives may need them.

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


def _live(jaxpr: Closed) -> Closed:
    # JAX knows which operands a call needs for an output, and rebuilds the call; only
    # for `while` it does not in all of its versions. What is carried there for nothing
    # may have been all that needed an equation before it.
    live, _ = without_dead_code(jaxpr, keep=True)
    smaller = with_equations(live, _without_dead_carries(live.jaxpr))
    return live if smaller is live else _live(smaller)


def _with_used_constants(jaxpr: Closed) -> Closed:
    used = _variables_read(jaxpr.jaxpr)
    constants = zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    kept = {var: const for var, const in constants if var in used}
    return with_parts(jaxpr, constants=kept)


def _variables_read(jaxpr: jex.Jaxpr) -> set[jax.core.Atom]:
    """The variables that equations read, and those that are outputs."""
    atoms = (*(atom for eqn in jaxpr.eqns for atom in eqn.invars), *jaxpr.outvars)
    return {atom for atom in atoms if isinstance(atom, jex.Var)}


def _size(jaxpr: Closed) -> int:
    """Counts equations, and what they read and write."""
    return len(jaxpr.consts) + sum(
        1
        + len(eqn.invars)
        + sum(not isinstance(var, jex.DropVar) for var in eqn.outvars)
        + sum(map(_size, rewritable_programs(eqn)))
        for eqn in jaxpr.eqns
    )


def _without_dead_carries(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    read = _variables_read(jaxpr)
    return [
        _smaller_while(eqn, [var in read for var in eqn.outvars])
        if eqn.primitive.name == "while"
        else eqn
        for eqn in jaxpr.eqns
    ]


def _smaller_while(eqn: jex.JaxprEqn, used: list[bool]) -> jex.JaxprEqn:
    """A `while` without the constants and carries that nothing needs."""
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    counts = params["cond_nconsts"], params["body_nconsts"]
    groups = split(eqn.invars, *counts)
    for_cond, by_cond = split(inputs_read(cond, [True]), counts[0])
    used = union(used, by_cond)
    while True:  # a carry that is needed may need others
        for_body, by_body = split(inputs_read(body, used), counts[1])
        if union(used, by_body) == used:
            break
        used = union(used, by_body)
    kept = for_cond, for_body, used
    if all(map(all, kept)):
        return eqn
    return eqn.replace(
        invars=[
            atom
            for group, flags in zip(groups, kept, strict=True)
            for atom in pick(group, flags)
        ],
        outvars=pick(eqn.outvars, used),
        params=dict(
            params,
            cond_jaxpr=without_dead_code(cond, [True], [*for_cond, *used])[0],
            cond_nconsts=sum(for_cond),
            body_jaxpr=without_dead_code(body, used, [*for_body, *used])[0],
            body_nconsts=sum(for_body),
        ),
    )
