"""Copy propagation: replaces the copy of a variable by the variable."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.core
import jax.extend.core as jex

from .._compat import CALLS, form_of, scan_counts
from .._programs import Rewriter, rewritable_programs
from ._atoms import Closed, by_equation, is_array, jaxpr_pass

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
    elif name in CALLS:
        (jaxpr,) = rewritable_programs(eqn)
        yield from _handed_on(jaxpr, eqn.invars, eqn.outvars)
    elif name == "cond":
        yield from _handed_on_by_all(eqn)
    elif name == "scan":
        consts, carry = scan_counts(eqn.params)
        (jaxpr,) = rewritable_programs(eqn)
        yield from _carried_along(eqn, jaxpr, consts, eqn.invars[consts:], carry)
    elif name == "while":
        consts = eqn.params["body_nconsts"]
        init = eqn.invars[eqn.params["cond_nconsts"] + consts :]
        yield from _carried_along(
            eqn, eqn.params["body_jaxpr"], consts, init, len(init)
        )


def _handed_on(
    jaxpr: Closed, operands: list[Any], outvars: list[Any]
) -> Iterator[tuple[jex.Var, jax.core.Atom]]:
    outside = dict(zip(jaxpr.jaxpr.invars, operands, strict=True))
    for var, atom in zip(outvars, jaxpr.jaxpr.outvars, strict=True):
        if isinstance(atom, jex.Literal):
            yield var, atom
        elif atom in outside:
            yield var, outside[atom]


def _handed_on_by_all(eqn: jex.JaxprEqn) -> Iterator[tuple[jex.Var, jax.core.Atom]]:
    branches = eqn.params["branches"]
    found = [dict(_handed_on(b, eqn.invars[1:], eqn.outvars)) for b in branches]
    for var in eqn.outvars:
        atoms = [copies.get(var) for copies in found]
        if atoms[0] is not None and all(atom is atoms[0] for atom in atoms):
            yield var, atoms[0]


def _carried_along(
    eqn: jex.JaxprEqn, body: Closed, consts: int, init: list[Any], carry: int
) -> Iterator[tuple[jex.Var, jax.core.Atom]]:
    ins = body.jaxpr.invars[consts : consts + carry]
    outs = body.jaxpr.outvars[:carry]
    for var, before, after, atom in zip(eqn.outvars, ins, outs, init, strict=False):
        if before is after:
            yield var, atom


def _counts_up(dimensions: Any) -> bool:
    return tuple(dimensions) == tuple(range(len(dimensions)))
