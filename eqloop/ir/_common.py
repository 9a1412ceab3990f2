"""Common subexpressions: what was computed before is not computed again."""

from collections.abc import Hashable
from typing import Any

import jax.core
import jax.extend.core as jex

from .._arrays import is_complex
from .._compat import form_of
from .._programs import Rewriter, equation_bits, literal_bits
from ._atoms import by_equation, is_array, jaxpr_pass
from ._primitives import COMMUTATIVE, DISTINCT


@by_equation
def _merge(
    rewriter: Rewriter, eqn: jex.JaxprEqn, first: dict[Any, Any]
) -> jex.JaxprEqn:
    same = _first_like(eqn, first)
    if same is not eqn:
        for var, earlier in zip(eqn.outvars, same.outvars, strict=True):
            if not isinstance(var, jex.DropVar):
                rewriter.replace(var, earlier)
    return eqn


@jaxpr_pass(_merge)
def eliminate_common_subexpressions(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Keeps one of several equations that compute the same from the same operands.

    Equations with effects stay, and so do intended repetitions: what `jax.checkpoint`
    computes again, and barriers. An equation inside a loop, a branch or a call is
    compared with its neighbours, and not with equations outside.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.sin(x))(1.0)
        >>> ir.eliminate_common_subexpressions(jaxpr)
        { lambda ; a:f32[]. let b:f32[] = sin a; c:f32[] = mul b b in (c,) }
    """
    ...


def _first_like(eqn: jex.JaxprEqn, first: dict[Hashable, jex.JaxprEqn]) -> jex.JaxprEqn:
    """The first equation that computes the same, which may be this one."""
    if eqn.effects or form_of(eqn) in DISTINCT:
        return eqn
    if not all(map(is_array, [*eqn.invars, *eqn.outvars])):
        return eqn
    try:
        earlier = first.setdefault(_key(eqn), eqn)
    except TypeError:  # a parameter that cannot be hashed
        return eqn
    needed = zip(earlier.outvars, eqn.outvars, strict=True)
    if any(isinstance(a, jex.DropVar) > isinstance(b, jex.DropVar) for a, b in needed):
        return eqn  # that one drops what is needed here
    return earlier


def _key(eqn: jex.JaxprEqn) -> Hashable:
    operands = [_operand_key(atom) for atom in eqn.invars]
    if _commutes(eqn):
        operands.sort(key=repr)
    return equation_bits(eqn), tuple(operands)


def _commutes(eqn: jex.JaxprEqn) -> bool:
    if eqn.primitive.name == "mul" and is_complex(eqn.outvars[0].aval):
        return False  # in which order the four products are rounded is the device's
    return eqn.primitive.name in COMMUTATIVE


def _operand_key(atom: jax.core.Atom) -> Hashable:
    if isinstance(atom, jex.Var):
        return "var", id(atom)
    return "literal", literal_bits(atom)
