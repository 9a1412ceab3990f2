"""Equations of formulas that JAX's `checkify` can look into.

To `checkify` an equation is one operation, unless a parameter of it is a `call_jaxpr`.
Then that program is evaluated with a check after each of its operations, and how to do
that is handed to the primitive:

    primitive.bind(*errors, *inputs, subfuns=(checked program,), **other parameters)

JAX's own primitive for formulas has no such parameter. So where a formula is traced,
the equation is one of the primitive here, and its program is what the formula expands
to. It is traced only if `checkify` reads it. To evaluate such an equation is to call
the formula, so whatever else JAX does to it is by the rules of JAX's own primitive.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, partial_eval

from .._arrays import put, zero_tangent
from .._compat import LOSES_SYMBOLIC_ZEROS, call_primitive, rule_tangent
from .._tracebacks import rule
from .._types import Value
from ._effects import has_checks, has_io
from ._equations import Rewrite, formula_params
from ._jaxprs import map_programs, rewrite_everywhere, with_equations

JAX_PRIMITIVE: Any = call_primitive()


class _Expandable(jex.Primitive):
    multiple_results = True
    skip_canonicalization = True

    @rule
    def bind(self, *args: Any, subfuns: Sequence[Any] = (), **params: Any) -> Any:
        if not subfuns:
            return super().bind(*args, **params)
        (checked,) = subfuns
        return _run_checked(params["_prim"], checked.call_wrapped, args)

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        return JAX_PRIMITIVE.bind_with_trace(trace, args, avals, _of_jax(params))

    def abstract_eval(self, *avals: Any, **params: Any) -> Any:
        return JAX_PRIMITIVE.abstract_eval(*avals, **_of_jax(params))

    def to_lojax(self, *args: Any, **params: Any) -> Any:
        return JAX_PRIMITIVE.to_lojax(*args, **_of_jax(params))

    def is_effectful(self, params: Any) -> bool:
        return JAX_PRIMITIVE.is_effectful(_of_jax(params))

    def is_high(self, *avals: Any, **params: Any) -> bool:
        return True


# By this name JAX, and the rest of the library, know what the equation is.
PRIMITIVE = _Expandable(JAX_PRIMITIVE.name)


def _of_jax(params: dict[str, Any]) -> dict[str, Any]:
    return {"_prim": params["_prim"]}


def _as_jax(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    return eqn.replace(primitive=JAX_PRIMITIVE, params=_of_jax(eqn.params))


def _dce_rule(used: list[bool], *args: Any) -> tuple[list[bool], Any]:
    *others, eqn = args  # JAX 0.12 has one more
    of_jax: Any = partial_eval.dce_rules[JAX_PRIMITIVE]
    reads, new = of_jax(used, *others, _as_jax(eqn))
    if new is None:
        return reads, None
    return reads, new.replace(
        primitive=PRIMITIVE, params=formula_params(new.params["_prim"])
    )


def _transpose_rule(cts: Any, *args: Any, _prim: Any, call_jaxpr: Any) -> list[Any]:
    is_linear = list(map(ad.is_undefined_primal, args))
    return put([None] * len(args), is_linear, _prim.transposed(is_linear, args, cts))


partial_eval.dce_rules[PRIMITIVE] = _dce_rule
ad.primitive_transposes[PRIMITIVE] = _transpose_rule


# With checks.


def _run_checked(
    formula: Any, checked: Callable[..., Any], args: Sequence[Value]
) -> list[Value]:
    """Runs the expansion of a formula with checks; its derivatives are the formula's.

    As in JAX, a derivative that is taken of checked code has no checks of its own.
    """
    # Traced once, as `checkify` may not be asked twice.
    program = jax.make_jaxpr(checked)(*map(jax.typeof, args))
    if has_io(program.effects):
        # It must happen once, and the derivative below runs the formula as well.
        return jex.jaxpr_as_fun(program)(*args)
    run = jax.custom_jvp(jex.jaxpr_as_fun(program))
    errors_in = len(args) - len(formula.in_avals_flat)
    errors_out = len(program.out_avals) - len(formula.out_avals_flat)

    def derivative(primals: Any, tangents: Any) -> Any:
        inputs = formula.in_tree.unflatten(primals[errors_in:])
        dots = [
            zero_tangent(aval) if isinstance(dot, SymbolicZero) else dot
            for aval, dot in zip(
                formula.in_avals_flat, tangents[errors_in:], strict=True
            )
        ]
        bare = formula.rewritten(without_checks)
        outs, dots = bare.jvp(inputs, formula.in_tree.unflatten(dots))
        errors = run(*primals)[:errors_out]
        zeros = [zero_tangent(aval) for aval in program.out_avals[:errors_out]]
        dots = [*zeros, *formula.flat_out(dots)]
        return [*errors, *formula.flat_out(outs)], list(map(rule_tangent, dots))

    run.defjvp(derivative, symbolic_zeros=not LOSES_SYMBOLIC_ZEROS)
    return run(*args)


def without_checks(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program without each `checkify.check` in it."""

    def level(program: jex.ClosedJaxpr, rewrite: Rewrite) -> jex.ClosedJaxpr:
        eqns = list[jex.JaxprEqn]()
        for eqn in program.eqns:
            if has_checks(eqn.effects):
                if not eqn.outvars:
                    continue
                left = {e for e in eqn.effects if not has_checks([e])}
                eqn = map_programs(eqn, rewrite).replace(effects=left)
            eqns.append(eqn)
        return with_equations(program, eqns)

    return rewrite_everywhere(level, program)
