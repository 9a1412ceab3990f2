"""The jaxprs inside an equation, and what flows into and out of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex

from .._compat import form_of, form_params, scan_counts
from .._programs import rewritable_programs
from ._atoms import Closed


@dataclasses.dataclass(frozen=True)
class EquationPart:
    """A jaxpr inside an equation.

    Attributes:
        label: The part that it plays: `"body"`, `"cond"`, `"branch 0"`.
        operands: For each of its inputs the operand of the equation that it begins as.
        gives_results: Whether its outputs become those of the equation.
    """

    label: str
    jaxpr: Closed
    operands: Sequence[Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    gives_results: bool = True


def parts(eqn: jex.JaxprEqn) -> list[EquationPart]:
    """The parts of an equation; none if it is a plain operation."""
    name = eqn.primitive.name
    if name == "scan":
        return [_body(eqn)]
    if name == "while":
        return _condition_and_body(eqn)
    operands = eqn.invars[1:] if name == "cond" else eqn.invars
    jaxprs = list(rewritable_programs(eqn))
    labels = [f"branch {i}" for i in range(len(jaxprs))] if name == "cond" else ["body"]
    return [
        EquationPart(
            label,
            jaxpr,
            operands,
            numbered("input", len(jaxpr.in_avals)),
            numbered("output", len(jaxpr.out_avals)),
        )
        for label, jaxpr in zip(labels, jaxprs, strict=False)
    ]


def title(eqn: jex.JaxprEqn) -> str:
    """What an equation is called."""
    name, params = form_of(eqn), form_params(eqn)
    if name == "scan":
        way = ", last first" if params["reverse"] else ""
        return f"scan, {params['length']} steps{way}"
    if name == "remat2":
        return "checkpoint"
    if name == "call_hi_primitive":  # those of this library share a primitive
        return type(params["_prim"]).__name__
    called = params.get("name")
    return f"{name} {called}" if isinstance(called, str) else name


def function_name(f: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a module; `f` for a lambda."""
    name = getattr(f, "__name__", type(f).__name__)
    return name if name.isidentifier() else "f"


def numbered(what: str, count: int) -> list[str]:
    """`["x 0", "x 1"]`; for a single one `["x"]`."""
    return [what] if count == 1 else [f"{what} {i}" for i in range(count)]


def _body(eqn: jex.JaxprEqn) -> EquationPart:
    (jaxpr,) = rewritable_programs(eqn)
    consts, carry = scan_counts(eqn.params)
    xs = len(jaxpr.in_avals) - consts - carry
    ys = len(jaxpr.out_avals) - carry
    inputs = [
        *numbered("const", consts),
        *numbered("carry", carry),
        *numbered("x", xs),
    ]
    outputs = [*numbered("carry", carry), *numbered("y", ys)]
    return EquationPart("body", jaxpr, eqn.invars, inputs, outputs)


def _condition_and_body(eqn: jex.JaxprEqn) -> list[EquationPart]:
    params, start = eqn.params, 0
    init = eqn.invars[params["cond_nconsts"] + params["body_nconsts"] :]
    carry = numbered("carry", len(init))
    found = []
    for label, outputs in (("cond", ["continue"]), ("body", carry)):
        count = params[f"{label}_nconsts"]
        operands = [*eqn.invars[start : start + count], *init]
        start += count
        found.append(
            EquationPart(
                label,
                params[f"{label}_jaxpr"],
                operands,
                [*numbered("const", count), *carry],
                outputs,
                label == "body",
            )
        )
    return found
