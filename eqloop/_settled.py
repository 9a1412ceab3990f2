"""What is left of a program when it has been differentiated: its custom rules are gone.

`jax.custom_jvp` and `jax.custom_vjp` let a user say what the derivative of a function
is. Such a rule also says what the value is, and where a derivative is taken, JAX runs
the rule instead of the function. So a second derivative is one of the rule, and not of
the function again: that of a straight-through estimator whose rule returns
`jnp.round(x)` is zero. A loop that JAX does not differentiate step by step has to keep
to this by itself.
"""

import functools
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ._compat import is_through
from ._formula import Formula
from ._partition import Flags, pick, put, split
from ._reaching import inner_programs
from ._tangents import is_inexact


@functools.lru_cache(maxsize=256)
def settled(jaxpr: jex.ClosedJaxpr, marks: Flags, reverse: bool) -> jex.ClosedJaxpr:
    """A program with the primals that custom rules give.

    Args:
        jaxpr: The program, which closes over nothing.
        marks: For which of its inputs it was differentiated.
        reverse: Whether in reverse mode: `jax.custom_vjp` has no other.

    Returns:
        A program of the same signature; the same object, if there are no rules.
    """
    if not any(marks) or not has_rules(jaxpr):
        return jaxpr
    types, run = list(jaxpr.in_avals), jex.jaxpr_as_fun(jaxpr)

    def primal(*flat: Any) -> list[Any]:
        inputs, tangents = split(flat, len(types))
        marked = pick(inputs, marks)

        def of_marked(marked: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = run(*put(inputs, marks, marked))
            return list(filter(is_inexact, outs)), outs

        if reverse:
            _, _, outs = jax.vjp(of_marked, marked, has_aux=True)
        else:
            _, _, outs = jax.jvp(of_marked, (marked,), (tangents,), has_aux=True)
        return outs

    dots = [aval.to_tangent_aval() for aval in pick(types, marks)]
    traced = jax.make_jaxpr(primal)(*types, *dots)
    keep = [True] * len(types) + [False] * len(dots)
    used_outs = [True] * len(traced.out_avals)
    live, used = partial_eval.dce_jaxpr(traced.jaxpr, used_outs, keep)
    if list(used) != keep:
        return jaxpr  # a rule whose primal depends on tangents, which JAX leaves open
    return jex.ClosedJaxpr(live, traced.consts)


def has_rules(jaxpr: Any) -> bool:
    """Whether there is a custom derivative in a program, or in one inside it."""
    return _has(jaxpr, ("custom_jvp_call", "custom_vjp_call"))


def has_backward_rules(jaxpr: Any) -> bool:
    """Whether there is a `jax.custom_vjp` in a program, or in one inside it.

    Its backward rule need not be linear in the cotangent that it is given.
    """
    return _has(jaxpr, ("custom_vjp_call",))


@functools.lru_cache(maxsize=256)
def _has(jaxpr: Any, names: tuple[str, ...]) -> bool:
    return any(_is_one(eqn, names) for eqn in jaxpr.eqns)


def _is_one(eqn: Any, names: tuple[str, ...]) -> bool:
    if is_through(eqn):
        return False
    # JAX 0.12 makes its own kind of `hijax` primitive of a custom derivative.
    primitive = eqn.params.get("_prim")
    is_foreign = primitive is not None and not isinstance(primitive, Formula)
    return (
        eqn.primitive.name.startswith(names)
        or is_foreign
        or any(_has(inner, names) for inner in inner_programs(eqn))
    )
