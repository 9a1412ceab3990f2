"""JAX's loops in rules of a `jax.custom_vjp` or `custom_jvp`: what is stored of them.

A rule may store anything, and make anything of it on the way back. So what its way
there makes of the outputs of a loop is followed to whatever reads it on the way back.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.extend.core as jex

from .._arrays import nbytes
from .._compat import scan_counts
from .._programs import (
    RuleAround,
    aval_of,
    formula_of,
    is_later,
    programs_in,
    rule_around,
)
from .._types import AnyJaxpr, Aval


@dataclasses.dataclass(eq=False)
class RuleLoop:
    """A loop of JAX in the rule of a function.

    Attributes:
        eqn: Its equation.
        scope: The name stacks of that equation, and of those that it is in.
        rule: The function whose rule it is in.
        kept: What is made of its outputs and stored: the types, by the identity of the
            equation that makes it, and the number of the output there.
        back: The loops that read any of this on the way back.
    """

    eqn: jex.JaxprEqn
    scope: str
    rule: RuleAround
    kept: dict[tuple[int, int], Aval] = dataclasses.field(default_factory=dict)
    back: list[jex.JaxprEqn] = dataclasses.field(default_factory=list)

    @property
    def stored_bytes(self) -> int:
        """The bytes of what is stored."""
        return nbytes(list(self.kept.values()))


class _MadeOfLoop(NamedTuple):
    """What a rule has made of the outputs of a loop."""

    loop: RuleLoop
    eqn: jex.JaxprEqn
    number: int


def rule_loops(program: AnyJaxpr) -> dict[int, RuleLoop]:
    """The loops of which rules store anything, by the identities of their equations."""
    search = _RuleFollower()
    search.walk(program, (), "", None)
    return {key: loop for key, loop in search.loops.items() if loop.kept}


def programs_called(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """The programs that an equation runs once, of all its operands but a condition."""
    if eqn.primitive.name in ("scan", "while") or formula_of(eqn) is not None:
        return []
    operands = len(eqn.invars) - (eqn.primitive.name == "cond")
    programs = [getattr(program, "jaxpr", program) for program in programs_in(eqn)]
    shapes = {(len(p.invars), len(p.outvars)) for p in programs}
    return programs if shapes == {(operands, len(eqn.outvars))} else []


class _RuleFollower:
    """Follows what rules make of the outputs of loops through a program."""

    def __init__(self) -> None:
        self.loops: dict[int, RuleLoop] = {}

    def walk(
        self,
        program: AnyJaxpr,
        given: Sequence[_MadeOfLoop | None],
        scope: str,
        rule: RuleAround | None,
    ) -> list[_MadeOfLoop | None]:
        """What the outputs of a program are.

        All of it is in the rule of a function, if one is given.
        """
        jaxpr = getattr(program, "jaxpr", program)
        known = dict(zip(map(id, jaxpr.invars), given, strict=False))
        for eqn in jaxpr.eqns:
            inputs = [known.get(id(atom)) for atom in eqn.invars]
            inner = f"{scope}/{eqn.source_info.name_stack}"
            outputs = self._of_equation(eqn, inputs, inner, rule)
            known.update(zip(map(id, eqn.outvars), outputs, strict=False))
        return [known.get(id(atom)) for atom in jaxpr.outvars]

    def _of_equation(
        self,
        eqn: jex.JaxprEqn,
        inputs: list[_MadeOfLoop | None],
        scope: str,
        rule: RuleAround | None,
    ) -> Sequence[_MadeOfLoop | None]:
        programs = programs_in(eqn)
        if not programs and not any(inputs):
            return ()
        rule = rule or rule_around(eqn.source_info)
        if called := programs_called(eqn):
            given = inputs[eqn.primitive.name == "cond" :]
            of_each = [self.walk(each, given, scope, rule) for each in called]
            joined = zip(*of_each, strict=True)
            return [next(filter(None, each), None) for each in joined]
        if rule is None and eqn.primitive.name == "scan":
            # What a rule stores in a step is stacked, and comes back row by row.
            consts, carry = scan_counts(eqn.params)
            no_carry: list[_MadeOfLoop | None] = [None] * carry
            given = [*inputs[:consts], *no_carry, *inputs[consts + carry :]]
            found = self.walk(eqn.params["jaxpr"], given, scope, None)
            return [*no_carry, *found[carry:]]
        for each in programs:
            self.walk(each, (), scope, rule)
        return () if rule is None else self._of_rule(eqn, inputs, scope, rule)

    def _of_rule(
        self,
        eqn: jex.JaxprEqn,
        inputs: list[_MadeOfLoop | None],
        scope: str,
        rule: RuleAround,
    ) -> Sequence[_MadeOfLoop | None]:
        """What the outputs of an equation in a rule are."""
        loop, is_loop = None, eqn.primitive.name in ("scan", "while")
        for value in filter(None, inputs):
            source, maker, number = value
            if not is_later(scope, source.scope):
                loop = loop or source
                continue
            source.kept[id(maker), number] = aval_of(maker.outvars[number])
            if is_loop and not any(eqn is other for other in source.back):
                source.back.append(eqn)
        if is_loop:
            loop = self.loops.setdefault(id(eqn), RuleLoop(eqn, scope, rule))
        if loop is None:
            return ()
        return [_MadeOfLoop(loop, eqn, i) for i in range(len(eqn.outvars))]
