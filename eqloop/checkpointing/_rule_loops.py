"""JAX's loops in rules of a `jax.custom_vjp` or `custom_jvp`: what is stored of them.

A rule may store anything, and make anything of it on the way back. So what its way
there makes of the outputs of a loop is followed to whatever reads it on the way back.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

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

_Made = TypeVar("_Made")


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


class Where(NamedTuple):
    """Where an equation is: in which name stacks, and in the rule of which function."""

    scope: str = ""
    rule: RuleAround | None = None


class AbstractFollower(abc.ABC, Generic[_Made]):
    """Follows what is made of the outputs of loops through a program."""

    @abc.abstractmethod
    def of_equation(
        self, eqn: jex.JaxprEqn, inputs: list[_Made | None], at: Where
    ) -> Sequence[_Made | None]:
        """What the outputs of an equation are."""

    def walk(
        self, program: AnyJaxpr, given: Sequence[_Made | None], at: Where
    ) -> list[_Made | None]:
        """What the outputs of a program are."""
        jaxpr = getattr(program, "jaxpr", program)
        known = dict(zip(map(id, jaxpr.invars), given, strict=False))
        for eqn in jaxpr.eqns:
            inputs = [known.get(id(atom)) for atom in eqn.invars]
            scope = f"{at.scope}/{eqn.source_info.name_stack}"
            outputs = self.of_equation(eqn, inputs, at._replace(scope=scope))
            known.update(zip(map(id, eqn.outvars), outputs, strict=False))
        return [known.get(id(atom)) for atom in jaxpr.outvars]

    def of_call(
        self, called: Sequence[AnyJaxpr], given: Sequence[_Made | None], at: Where
    ) -> list[_Made | None]:
        """What the outputs are of an equation that runs one of these programs."""
        of_each = [self.walk(program, given, at) for program in called]
        return [next(filter(None, each), None) for each in zip(*of_each, strict=True)]


def programs_called(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """The programs that an equation runs once, of all its operands but a condition."""
    if eqn.primitive.name in ("scan", "while") or formula_of(eqn) is not None:
        return []
    operands = len(eqn.invars) - (eqn.primitive.name == "cond")
    programs = [getattr(program, "jaxpr", program) for program in programs_in(eqn)]
    shapes = {(len(p.invars), len(p.outvars)) for p in programs}
    return programs if shapes == {(operands, len(eqn.outvars))} else []


class _MadeOfLoop(NamedTuple):
    """What a rule has made of the outputs of a loop."""

    loop: RuleLoop
    eqn: jex.JaxprEqn
    number: int


def rule_loops(program: AnyJaxpr) -> dict[int, RuleLoop]:
    """The loops of which rules store anything, by the identities of their equations."""
    search = _RuleFollower()
    search.walk(program, (), Where())
    return {key: loop for key, loop in search.loops.items() if loop.kept}


class _RuleFollower(AbstractFollower[_MadeOfLoop]):
    """Follows what rules make of the outputs of loops through a program."""

    def __init__(self) -> None:
        self.loops: dict[int, RuleLoop] = {}

    def of_equation(
        self, eqn: jex.JaxprEqn, inputs: list[_MadeOfLoop | None], at: Where
    ) -> Sequence[_MadeOfLoop | None]:
        programs = programs_in(eqn)
        if not programs and not any(inputs):
            return ()
        at = at._replace(rule=at.rule or rule_around(eqn.source_info))
        if called := programs_called(eqn):
            return self.of_call(called, inputs[eqn.primitive.name == "cond" :], at)
        if at.rule is None and eqn.primitive.name == "scan":
            # What a rule stores in a step is stacked, and comes back row by row.
            consts, carry = scan_counts(eqn.params)
            no_carry: list[_MadeOfLoop | None] = [None] * carry
            given = [*inputs[:consts], *no_carry, *inputs[consts + carry :]]
            found = self.walk(eqn.params["jaxpr"], given, at)
            return [*no_carry, *found[carry:]]
        for each in programs:
            self.walk(each, (), at)
        if at.rule is None:
            return ()
        loop, is_loop = None, eqn.primitive.name in ("scan", "while")
        for value in filter(None, inputs):
            source, maker, number = value
            if not is_later(at.scope, source.scope):
                loop = loop or source
                continue
            source.kept[id(maker), number] = aval_of(maker.outvars[number])
            if is_loop and not any(eqn is other for other in source.back):
                source.back.append(eqn)
        if is_loop:
            loop = self.loops.setdefault(id(eqn), RuleLoop(eqn, at.scope, at.rule))
        if loop is None:
            return ()
        return [_MadeOfLoop(loop, eqn, i) for i in range(len(eqn.outvars))]
