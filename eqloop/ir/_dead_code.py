"""Dead code: what no output and no effect needs."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
from jax.interpreters import partial_eval

from .._lists import pick, split
from ._rewriter import Rewriter
from ._walk import Closed, Rewrite, check_closed, inner, rewrite_everywhere


def eliminate_dead_code(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Removes what no output needs.

    That is equations without effects, outputs and operands of the calls, branches and
    loops among them that are not needed, and constants. The functions with derivatives
    of their own keep theirs, since their derivatives may need them.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is no closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> def f(x):
        ...     unused = jnp.cos(x)
        ...     return jnp.sin(x)
        >>> ir.eliminate_dead_code(jax.make_jaxpr(f)(1.0))
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    check_closed(jaxpr, "eliminate_dead_code")
    return rewrite_everywhere(_eliminate, jaxpr)


def _eliminate(jaxpr: Closed, rewrite: Rewrite) -> Closed:
    rewriter = Rewriter(jaxpr)
    for eqn in jaxpr.eqns:
        rewriter.eqns.append(rewriter.enter(eqn, rewrite))
    jaxpr = rewriter.result()
    # JAX knows which operands a call needs for an output, and rebuilds the call; only
    # for `while` it does not in all of its versions.
    used = [True] * len(jaxpr.jaxpr.outvars)
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, used, instantiate=True)
    live = live.replace(eqns=_without_dead_carries(live))
    new = _with_used_constants(live, jaxpr.consts)
    # It makes all calls anew. Where none is smaller, nothing has been eliminated.
    return new if _size(new) < _size(jaxpr) else jaxpr


def _with_used_constants(jaxpr: jex.Jaxpr, consts: Sequence[Any]) -> Closed:
    read = {
        atom
        for atom in (*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars)
        if isinstance(atom, jex.Var)
    }
    used = [var in read for var in jaxpr.constvars]
    constvars = pick(jaxpr.constvars, used)
    return jex.ClosedJaxpr(jaxpr.replace(constvars=constvars), pick(consts, used))


def _size(jaxpr: Closed) -> int:
    """Counts equations, and what they read and write."""
    return len(jaxpr.consts) + sum(
        1
        + len(eqn.invars)
        + sum(not isinstance(var, jex.DropVar) for var in eqn.outvars)
        + sum(map(_size, inner(eqn)))
        for eqn in jaxpr.eqns
    )


def _without_dead_carries(jaxpr: jex.Jaxpr) -> list[jex.JaxprEqn]:
    read = {
        id(atom)
        for atom in (*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars)
    }
    return [
        _smaller_while(eqn, [id(var) in read for var in eqn.outvars])
        if eqn.primitive.name == "while"
        else eqn
        for eqn in jaxpr.eqns
    ]


def _smaller_while(eqn: jex.JaxprEqn, used: list[bool]) -> jex.JaxprEqn:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    counts = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, init = split(eqn.invars, *counts)
    _, by_cond = partial_eval.dce_jaxpr(cond.jaxpr, [True], instantiate=False)
    used = [a or b for a, b in zip(used, by_cond[counts[0] :], strict=True)]
    while True:
        _, needs = partial_eval.dce_jaxpr(body.jaxpr, used, instantiate=False)
        more = [a or b for a, b in zip(used, needs[counts[1] :], strict=True)]
        if more == used:
            break
        used = more
    if all(used):
        return eqn
    kept_by_cond = [*([True] * counts[0]), *used]
    kept_by_body = [*([True] * counts[1]), *used]
    live, _ = partial_eval.dce_jaxpr(body.jaxpr, used, instantiate=kept_by_body)
    cond = _without_inputs(cond, kept_by_cond)
    body = jex.ClosedJaxpr(live, body.consts)
    return eqn.replace(
        invars=[*cond_consts, *body_consts, *pick(init, used)],
        outvars=pick(eqn.outvars, used),
        params=dict(params, cond_jaxpr=cond, body_jaxpr=body),
    )


def _without_inputs(jaxpr: Closed, kept: list[bool]) -> Closed:
    invars = pick(jaxpr.jaxpr.invars, kept)
    return jex.ClosedJaxpr(jaxpr.jaxpr.replace(invars=invars), jaxpr.consts)
