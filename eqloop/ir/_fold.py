"""Constant folding: what does not depend on the inputs is computed once."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.extend.core as jex

from .._compat import CALLS, form_of
from .._programs import Rewrite, Rewriter, literal_value, map_programs
from ._atoms import Closed, has_known_shape, is_array, jaxpr_pass, shape_of
from ._parts import parts
from ._primitives import FOLDABLE, GENERATORS

# The most elements that an operand or a result may have. Beyond it, holding a result in
# the program costs more than computing it, and tracing must not take long.
FOLD_LIMIT = 1024
# What runs jaxprs that may be others; those with derivative rules of their own stay.
_OPEN = {*CALLS, "cond", "scan", "while"}


def _fold(jaxpr: Closed, rewrite: Rewrite) -> Closed:
    rewriter = Rewriter(jaxpr)
    known = dict(_known_constants(jaxpr))
    for eqn in jaxpr.eqns:
        eqn = _with_operands_inside(rewriter.enter(eqn))
        eqn = rewriter.enter(eqn, rewrite)
        branch = _chosen_branch(eqn)
        if branch is not None:
            rewriter.inline(branch, eqn.invars[1:], eqn.outvars)
            continue
        for var, value in zip(eqn.outvars, _evaluate(eqn, known), strict=False):
            if eqn.primitive.name in GENERATORS and value.ndim:
                known[var] = value
            else:
                rewriter.replace(var, jex.Literal(value, var.aval))
        rewriter.emit(eqn)
    return rewriter.result()


@jaxpr_pass(_fold)
def constant_fold(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Computes what does not depend on the inputs.

    The results become literals. It evaluates only operations without effects whose
    operands and results have at most 1024 elements, and no loops. It carries constants
    into the jaxprs of calls, and replaces a `cond` whose index is known by its branch.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> f = lambda x: x * jnp.sqrt(jnp.float32(4))
        >>> ir.constant_fold(jax.make_jaxpr(f)(jnp.ones(3)))
        { lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }
    """
    ...


def _known_constants(jaxpr: Closed) -> Iterator[tuple[jex.Var, Any]]:
    for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        # A constant may be a tracer, if a transform is run within another.
        if not isinstance(const, jax.core.Tracer) and _is_small(var):
            yield var, const


def _is_small(atom: Any) -> bool:
    if not (is_array(atom) and has_known_shape(atom)):
        return False
    return math.prod(shape_of(atom)) <= FOLD_LIMIT


def _evaluate(eqn: jex.JaxprEqn, known: dict[jex.Var, Any]) -> list[Any]:
    """The results of an equation; none if it is not to be evaluated here."""
    if eqn.primitive.name not in FOLDABLE or eqn.effects:
        return []
    if not all(map(_is_small, [*eqn.invars, *eqn.outvars])):
        return []
    operands = [_value(atom, known) for atom in eqn.invars]
    if any(operand is None for operand in operands):
        return []
    results = _computed(eqn, operands)
    # Under another setting of `jax_enable_x64`, or inside `shard_map`, a value that is
    # computed here may not be of the type that it has there.
    same = len(results) == len(eqn.outvars) and all(
        jax.typeof(x) == v.aval for x, v in zip(results, eqn.outvars, strict=True)
    )
    return results if same else []


def _computed(eqn: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
    # The user has not asked for a transfer, so none may be refused.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        try:
            out = eqn.primitive.bind(*operands, **eqn.params)
        # `jax_debug_nans` should report it only if it is run, and what this device
        # lacks may exist where the program is run.
        except Exception:
            return []
    return list(out) if eqn.primitive.multiple_results else [out]


def _value(atom: Any, known: dict[jex.Var, Any]) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else known.get(atom)


def _chosen_branch(eqn: jex.JaxprEqn) -> Closed | None:
    """The branch of a `cond` whose index is a constant."""
    if eqn.primitive.name != "cond" or not isinstance(eqn.invars[0], jex.Literal):
        return None
    branches = eqn.params["branches"]
    index = int(literal_value(eqn.invars[0]))
    branch = branches[min(max(index, 0), len(branches) - 1)]
    # The effects of a `cond` are those of all of its branches.
    return branch if not eqn.effects else None


def _with_operands_inside(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """An equation whose jaxprs have the operands that are constants written in."""
    # The operands stay, unused, for the elimination of dead code to remove.
    if eqn.effects or form_of(eqn) not in _OPEN:
        return eqn  # some XLAs crash where callbacks in two calls share a constant
    fixed = {id(part.jaxpr): part.operands[: part.consts] for part in parts(eqn)}
    return map_programs(eqn, lambda jaxpr: _specialized(jaxpr, fixed[id(jaxpr)]))


def _specialized(jaxpr: Closed, operands: Any) -> Closed:
    rewriter = Rewriter(jaxpr)
    # A jaxpr may have fewer operands here than inputs: those that vary are left out.
    for var, atom in zip(jaxpr.jaxpr.invars, operands, strict=False):
        if isinstance(atom, jex.Literal):
            rewriter.replace(var, atom)
    for eqn in jaxpr.eqns:
        rewriter.eqns.append(rewriter.enter(eqn))
    return rewriter.result()
