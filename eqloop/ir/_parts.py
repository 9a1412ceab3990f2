"""The jaxprs inside an equation, and what flows into and out of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex

from .._arrays import split
from .._compat import form_of, form_params, scan_counts
from .._programs import rewritable_programs
from ._atoms import Closed


@dataclasses.dataclass(frozen=True)
class EquationPart:
    """A jaxpr inside an equation.

    Attributes:
        label: The part that it plays: `"body"`, `"cond"`, `"branch 0"`.
        operands: For each of its inputs the operand of the equation that it begins as.
        consts: How many inputs, the first ones, are the same each time that it is run.
        carry: How many inputs behind these a loop carries along; `None` if it is none.
    """

    label: str
    jaxpr: Closed
    operands: Sequence[Any]
    consts: int
    carry: int | None = None

    @property
    def gives_results(self) -> bool:
        """Whether its outputs become those of the equation."""
        return self.label != "cond"

    @property
    def inputs(self) -> list[str]:
        """What its inputs are called."""
        count = len(self.jaxpr.in_avals)
        if self.carry is None:
            return numbered("input", count)
        counts = {"const": self.consts, "carry": self.carry}
        counts["x"] = count - self.consts - self.carry
        return [name for what in counts for name in numbered(what, counts[what])]

    @property
    def outputs(self) -> list[str]:
        """What its outputs are called."""
        count = len(self.jaxpr.out_avals)
        if self.carry is None:
            return numbered("output", count)
        if not self.gives_results:
            return ["continue"]
        return [*numbered("carry", self.carry), *numbered("y", count - self.carry)]


def whole(jaxpr: Closed) -> EquationPart:
    """A jaxpr that is in no equation."""
    return EquationPart("", jaxpr, (), len(jaxpr.in_avals))


def parts(eqn: jex.JaxprEqn) -> list[EquationPart]:
    """The parts of an equation; none if it is a plain operation."""
    name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
    if name == "while":
        counts = params["cond_nconsts"], params["body_nconsts"]
        *consts, init = split(operands, *counts)
        return [
            EquationPart(
                label, params[f"{label}_jaxpr"], [*own, *init], len(own), len(init)
            )
            for label, own in zip(("cond", "body"), consts, strict=True)
        ]
    jaxprs = list(rewritable_programs(eqn))
    if name == "scan":
        consts, carry = scan_counts(params)
        return [EquationPart("body", jaxprs[0], operands, consts, carry)]
    operands = operands[1:] if name == "cond" else operands
    labels = [f"branch {i}" for i in range(len(jaxprs))] if name == "cond" else ["body"]
    return [
        EquationPart(label, jaxpr, operands, len(operands))
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
