"""Partial evaluation of formulas: what is known beforehand is computed beforehand.

JAX divides a program in two where it transposes what is linear in it, for example the
tangents of a `jax.custom_jvp` rule that computes the primal as well. What depends on
known inputs alone is evaluated. All else becomes a program of the unknown inputs, and
each result in it counts as linear. Of a primitive that has no rule of its own, all
outputs are unknown if one input is.

The outputs of a formula are divided one by one, by what each depends on
(`Formula.reached_out`). Take a loop that carries `c` and `t`, where `t` is unknown:

    c, t -> sin(c), t / c     known     Selected(loop, c)(c, 0)
                              unknown   Selected(loop, t)(c, t)

The second loop needs `c` at every step, so it computes it once more. Nothing is stored
for that: the transpose of the second loop is planned like any gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
from jax import ad_checkpoint
from jax.interpreters import partial_eval

from .._arrays import Flags, interleave, pick, zero_array
from .._types import Value
from ._effects import does_something
from ._equations import aval_of, formula_params
from ._expandable import JAX_PRIMITIVE, PRIMITIVE
from ._formula import Formula, Selected
from ._jaxprs import calling


def _unknown_outputs(primitive: object, unknown: Sequence[bool]) -> Flags | None:
    """Which outputs depend on unknown inputs; `None` for what is not divided.

    That is what others made, has effects, or is known or unknown as a whole.
    """
    if not isinstance(primitive, Formula) or not any(unknown):
        return None
    # Effects must not happen twice.
    if does_something(primitive.effects):
        return None
    outputs = tuple(primitive.reached_out(unknown, None))
    return None if all(outputs) else outputs


def _known_part(
    formula: Formula, unknown: Sequence[bool], outputs: Flags
) -> Callable[..., list[Value]]:
    """A function from the known inputs to the outputs that depend on no others."""
    part = Selected.of(formula, _others(outputs))

    def run(*known: Value) -> list[Value]:
        zeros = list(map(zero_array, pick(formula.in_avals_flat, unknown)))
        inputs = interleave(unknown, known, zeros)
        return part.flat_out(part(*part.in_tree.unflatten(inputs)))

    return run


def _trace_rule(trace: Any, *tracers: Any, _prim: Any) -> list[Value]:
    """The rule for a program that is evaluated as far as its inputs are known."""

    def as_ever(primitive: object) -> list[Value]:
        called, params = JAX_PRIMITIVE, {"_prim": primitive}
        if isinstance(primitive, Formula):
            called, params = PRIMITIVE, formula_params(primitive)
        return trace.default_process_primitive(called, tracers, params)

    unknown = [not tracer.is_known() for tracer in tracers]
    outputs = _unknown_outputs(_prim, unknown)
    if outputs is None:
        return as_ever(_prim)
    values = [tracer.pval.get_known() for tracer in pick(tracers, _others(unknown))]
    known = _known_part(_prim, unknown, outputs)(*values)
    rest = as_ever(Selected.of(_prim, outputs)) if any(outputs) else []
    return interleave(outputs, known, rest)


def _remat_rule(
    saveable: Callable[..., Any],
    unknown: Sequence[bool],
    available: Sequence[bool],
    eqn: jex.JaxprEqn,
) -> tuple[jex.JaxprEqn | None, jex.JaxprEqn | None, Flags, Flags, list[jex.Var]]:
    """The rule for a program in `jax.checkpoint`, which is run again later."""
    # It returns the equation that is run first and the one that is run again; which
    # outputs are unknown, and which are computed again; and the inputs to store for
    # that. `available` marks the inputs that are there when the program is run again.
    every, none = (True,) * len(eqn.outvars), (False,) * len(eqn.outvars)
    missing = pick(eqn.invars, _others(available))
    stored = [x for x in missing if isinstance(x, jex.Var)]
    outputs = _unknown_outputs(eqn.params["_prim"], unknown)
    if outputs is not None:
        return _known_equation(eqn, unknown, outputs), eqn, outputs, every, stored
    # What is not divided is treated as JAX does without a rule.
    if any(unknown):
        return None, eqn, every, every, stored
    if _is_kept(saveable, eqn):
        return eqn, None, none, none, []
    return eqn, eqn, none, every, stored


def _known_equation(
    eqn: jex.JaxprEqn, unknown: Sequence[bool], outputs: Flags
) -> jex.JaxprEqn:
    """The equation for those outputs of another one that are not unknown."""
    formula, known = eqn.params["_prim"], _others(unknown)
    given = pick(eqn.invars, known)
    call = calling(_known_part(formula, unknown, outputs), given)
    return eqn.replace(
        invars=given,
        outvars=pick(eqn.outvars, _others(outputs)),
        primitive=call.primitive,
        params=call.params,
        effects=call.effects,
    )


def _is_kept(saveable: Callable[..., Any], eqn: jex.JaxprEqn) -> bool:
    """Whether the outputs of a known equation are stored, and so not computed again."""
    if does_something(eqn.effects):
        return True  # so that it happens once
    answer = saveable(eqn.primitive, *map(aval_of, eqn.invars), **eqn.params)
    return answer is True or answer is ad_checkpoint.Saveable


def _others(flags: Sequence[bool]) -> Flags:
    return tuple(not flag for flag in flags)


partial_eval.custom_partial_eval_rules[JAX_PRIMITIVE] = _trace_rule
for primitive in (JAX_PRIMITIVE, PRIMITIVE):
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _remat_rule
