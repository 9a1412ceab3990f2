"""Policies that a schedule chooses: which named values of a step are kept.

A schedule can choose among the values that the user has named and the results of dots.
A policy of `jax.checkpoint` sees one equation at a time, and cannot tell one dot from
another. So each dot is given a name, too.
"""

import dataclasses
import functools
import itertools
import os
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ..._compat import called_by, form_of
from ..._programs import (
    Rewrite,
    aval_of,
    map_params,
    place_of,
    rewrite_everywhere,
    with_equations,
)
from ..._types import AnyJaxpr, Aval, Value

_DOTS = {"dot_general": "dot", "ragged_dot": "dot", "conv_general_dilated": "conv"}


@dataclasses.dataclass(frozen=True)
class KeptNames:
    """A policy that keeps the values with these names.

    `jax.checkpoint_policies.save_only_these_names` would return a new function each
    time, and each new function has JAX trace the step again. This one has an `==`.
    """

    names: tuple[str, ...]

    def __call__(self, prim: jex.Primitive, /, *avals: Aval, **params: Any) -> bool:
        return prim.name == "name" and params["name"] in self.names


@functools.lru_cache(maxsize=256)
def with_named_dots(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The program with a name for each dot that the user has not named.

    It is the very same if there are no dots.
    """
    # Dots within loops and branches get no name, as their values could only be kept
    # stacked or padded. A dot in a function that is called twice has one name for both
    # calls.
    numbers = itertools.count(1)

    def level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
        named = {e.invars[0] for e in program.eqns if form_of(e) == "name"}
        eqns: list[jex.JaxprEqn] = []
        for eqn in program.eqns:
            kind = _DOTS.get(eqn.primitive.name)
            if inner_call(eqn) is not None:
                change = lambda x: rewrite(x) if isinstance(x, jex.ClosedJaxpr) else x
                eqns.append(map_params(eqn, change))
            elif kind and eqn.outvars[0] not in named and can_be_kept(eqn):
                eqns += _named(eqn, f"{kind} {next(numbers)}{_line_of(eqn)}")
            else:
                eqns.append(eqn)
        return with_equations(program, eqns)

    return rewrite_everywhere(level, program)


def inner_call(eqn: jex.JaxprEqn) -> AnyJaxpr | None:
    """The program that an equation calls, if a policy is asked about what is in it."""
    # Not of the user's own `jax.checkpoint`, whose policy decides.
    return None if form_of(eqn) == "remat2" else called_by(eqn)


def _named(eqn: jex.JaxprEqn, name: str) -> list[Value]:
    """An equation, and one that gives a name to its result."""
    var = eqn.outvars[0]
    # Traced rather than built by hand: that gives the parameters of this version of
    # JAX, and a new variable for the result without a name.
    template = jax.make_jaxpr(lambda x: checkpoint_name(x, name))(aval_of(var)).jaxpr
    (unnamed,), (naming,) = template.invars, template.eqns
    naming = naming.replace(outvars=[var], source_info=eqn.source_info)
    return [eqn.replace(outvars=[unnamed]), naming]


def _line_of(eqn: jex.JaxprEqn) -> str:
    place = place_of(eqn.source_info)
    return "" if place is None else f" at {os.path.basename(place.file)}:{place.line}"


def can_be_kept(eqn: jex.JaxprEqn) -> bool:
    """Whether the result of an equation can be kept by a policy."""
    var = eqn.outvars[0]
    if isinstance(var, jex.DropVar):
        return False
    # `jax.checkpoint` does not take complex ones that are used further on (JAX 0.10).
    return not jnp.issubdtype(aval_of(var).dtype, jnp.complexfloating)
