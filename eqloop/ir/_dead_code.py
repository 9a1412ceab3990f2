"""Dead code: what no output and no effect needs."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
from jax.interpreters import partial_eval

from .._arrays import pick, split, union
from .._programs import Rewrite, inputs_read, rewritable_programs, rewrite_everywhere
from ._atoms import Closed, check_closed
from ._rewriter import Rewriter


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
    check_closed(jaxpr, "eliminate_dead_code")
    return rewrite_everywhere(_eliminate, jaxpr)


def _eliminate(jaxpr: Closed, rewrite: Rewrite) -> Closed:
    rewriter = Rewriter(jaxpr)
    for eqn in jaxpr.eqns:
        rewriter.eqns.append(rewriter.enter(eqn, rewrite))
    jaxpr = _with_fitting_names(rewriter.result())
    used = [True] * len(jaxpr.jaxpr.outvars)
    live = _live(jaxpr.jaxpr, used)
    new = _with_used_constants(live, jaxpr.consts)
    # JAX rebuilds all calls. If none became smaller, nothing has been eliminated.
    return new if _size(new) < _size(jaxpr) else jaxpr


def _with_fitting_names(jaxpr: Closed) -> Closed:
    """A jaxpr that JAX can rewrite, which insists on a name for each input.

    A `custom_jvp` of which some arguments are no arrays, `jax.scipy.special.log_ndtr`
    for one, has names for these, too.
    """
    info = jaxpr.jaxpr.debug_info
    if info.arg_names is None or len(info.arg_names) == len(jaxpr.jaxpr.invars):
        return jaxpr
    info = jex.DebugInfo(info.traced_for, info.func_src_info, None, info.result_paths)
    return jex.ClosedJaxpr(jaxpr.jaxpr.replace(debug_info=info), jaxpr.consts)


def _live(jaxpr: jex.Jaxpr, used: list[bool]) -> jex.Jaxpr:
    # JAX knows which operands a call needs for an output, and rebuilds the call; only
    # for `while` it does not in all of its versions. What is carried there for nothing
    # may have been all that needed an equation before it.
    live, _ = partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    eqns = _without_dead_carries(live)
    if all(new is old for new, old in zip(eqns, live.eqns, strict=True)):
        return live
    return _live(live.replace(eqns=eqns), used)


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
        + sum(map(_size, rewritable_programs(eqn)))
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
            cond_jaxpr=_restricted(cond, [True], [*for_cond, *used]),
            cond_nconsts=sum(for_cond),
            body_jaxpr=_restricted(body, used, [*for_body, *used]),
            body_nconsts=sum(for_body),
        ),
    )


def _restricted(jaxpr: Closed, outputs: list[bool], inputs: list[bool]) -> Closed:
    """A jaxpr with those outputs and inputs alone."""
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, outputs, instantiate=inputs)
    return jex.ClosedJaxpr(live, jaxpr.consts)
