"""Copy propagation: replaces the copy of a variable by the variable."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.core
import jax.extend.core as jex

from .._compat import CALLS, form_of
from .._programs import Rewriter
from ._atoms import by_equation, is_array, jaxpr_pass
from ._parts import parts

# Operations that give their first operand back if the shape is the same and the
# parameters say so. (`replace` has compared the types.)
_MOVES = "concatenate", "copy", "copy_p", "dynamic_slice", "slice", "squeeze"
_REDUCTIONS = (f"reduce_{kind}" for kind in ("and", "max", "min", "or", "prod", "sum"))
_IDENTITIES: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys((*_MOVES, "convert_element_type"), lambda p: True),
    **dict.fromkeys(_REDUCTIONS, lambda p: not p["axes"]),
    "broadcast_in_dim": lambda p: _counts_up(p["broadcast_dimensions"]),
    "pad": lambda p: not any(map(any, p["padding_config"])),
    "reshape": lambda p: p["dimensions"] is None,
    "rev": lambda p: not p["dimensions"],
    "transpose": lambda p: _counts_up(p["permutation"]),
}


@by_equation
def _propagate(
    rewriter: Rewriter, eqn: jex.JaxprEqn, _: dict[Any, Any]
) -> jex.JaxprEqn:
    for var, atom in _copies(eqn):
        if is_array(var):
            rewriter.replace(var, atom)
    return eqn


@jaxpr_pass(_propagate)
def propagate_copies(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Reads through operations and calls that return an operand unchanged.

    These are conversions to the same type, reshapes to the same shape and so on;
    outputs of a call that are its inputs or constants; and values that a loop carries
    along unchanged.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x.reshape(3).copy()))(jnp.ones(3))
        >>> ir.propagate_copies(jaxpr)
        { lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
    """
    ...


def _copies(eqn: jex.JaxprEqn) -> Iterator[tuple[jex.Var, jax.core.Atom]]:
    """The outputs of an equation that are operands or constants, with these."""
    name = form_of(eqn)
    if name in _IDENTITIES and _IDENTITIES[name](eqn.params):
        yield eqn.outvars[0], eqn.invars[0]
    elif name in CALLS or name == "cond":
        yield from _handed_on(eqn)
    elif name in ("scan", "while"):
        *_, body = parts(eqn)
        carry = slice(body.consts, body.consts + (body.carry or 0))
        init, ins = body.operands[carry], body.jaxpr.jaxpr.invars[carry]
        each = zip(eqn.outvars, ins, body.jaxpr.jaxpr.outvars, init, strict=False)
        yield from ((var, x) for var, before, after, x in each if before is after)


def _handed_on(eqn: jex.JaxprEqn) -> Iterator[tuple[jex.Var, jax.core.Atom]]:
    """The outputs that all programs of an equation hand on, with what these are."""
    each = list[list[jax.core.Atom | None]]()
    is_fixed = lambda x: isinstance(x, jex.Literal)
    for part in parts(eqn):
        jaxpr = part.jaxpr.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.invars, part.operands, strict=True))
        each.append([x if is_fixed(x) else known.get(x) for x in jaxpr.outvars])
    for var, atom, *others in zip(eqn.outvars, *each, strict=True):
        if atom is not None and all(other is atom for other in others):
            yield var, atom


def _counts_up(dimensions: Any) -> bool:
    return tuple(dimensions) == tuple(range(len(dimensions)))
