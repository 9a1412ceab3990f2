"""JAX's own loops in a program: those that it takes back, and what they store for it.

JAX makes two scans of one that is differentiated in reverse mode. The first also
returns the residuals of all steps, stacked. The second runs in the other direction and
reads them. Both are at the line that calls `jax.lax.scan`, `map` or `fori_loop`, and
both may be within calls, branches and other loops. So residuals are followed from the
one to the other. Loops in the rules of others are found by `_rule_loops.py`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._arrays import is_inexact, nbytes, split
from .._calls import format_bytes
from .._compat import close, scan_counts
from .._programs import (
    JAX_FILES,
    OUR_FILES,
    Place,
    RuleAround,
    alone,
    aval_of,
    frames_of,
    is_later,
    loop_of_jax,
    place_of,
    programs_in,
    pruned,
    run,
    temporary_bytes,
)
from .._types import AnyJaxpr, Value
from ._plan import Plan, as_table, estimated_plan, of_outputs
from ._rule_loops import (
    AbstractFollower,
    RuleLoop,
    Where,
    programs_called,
    rule_loops,
)
from ._run import form_to_plan, planned
from ._schedules import Recursive
from .engine._listing import unlisted
from .engine._transformed import activity
from .steps._loop import Loop
from .steps._step import Step

# What a loop would take is said for this schedule: the one of a `CheckpointedScan`.
_SCHEDULE = Recursive(16)


@dataclasses.dataclass(frozen=True)
class JaxPlan:
    """How JAX runs one of its own loops, which is differentiated in reverse mode.

    It stores the residuals of all steps, or what a rule says. Printed, it is a table.

    Attributes:
        length: How many steps the loop has; `None` for a while loop.
        peak_bytes: Bytes that a gradient allocates at once, besides its inputs and
            outputs: the residuals, and what a step takes by itself. Of a loop in a
            rule: what the rule stores of it.
        output_bytes: The bytes of the outputs that are stacked, and of their
            cotangents, on all devices together. A schedule does not change them.
        rescheduled: Nearly the plan that the loop would have by `Recursive(16)`. `None`
            if that is not known, and then the table says why: JAX may have put other
            functions in the place of those that have derivative rules, and these may
            have no derivative themselves. `None` also if there is a `rule`.
        rule: The `kind` and `place` of the function in whose rule the loop is, a
            `"custom_vjp"` or a `"custom_jvp"`; such loops stay as they are.
    """

    # No step is run again, or changed.
    levels: ClassVar[tuple[tuple[int, ...], ...]] = ()
    slots: ClassVar[int] = 0
    rewritten: ClassVar[tuple[str, ...]] = ()

    length: int | None
    peak_bytes: int
    output_bytes: int
    rescheduled: Plan | None
    rule: RuleAround | None = None
    _why_not: str = ""

    @property
    def block(self) -> int | None:
        """How many consecutive steps have their residuals stored together: all."""
        return self.length

    @property
    def evaluations(self) -> int | None:
        """How often one gradient evaluates the step; of a rule it is not known."""
        return None if self.rule else self.length

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Steps, schedule, what is stored, and evaluations, in a few words each."""
        if self.rule:
            steps = "any" if self.length is None else str(self.length)
            return steps, "none", "by a rule", "unknown"
        return str(self.length), "none", "residuals", str(self.evaluations)

    @property
    def notes(self) -> dict[str, str]:
        """What a schedule would change, and what not, where that is much."""
        notes, other = dict[str, str](), self.rescheduled
        if self.rule:
            kind, place = self.rule
            rule = f"`jax.{kind}` at {place}" if place else f"`jax.{kind}`"
            notes["left"] = f"the {rule} says what is stored; no schedule does"
        notes |= of_outputs(self.output_bytes, self.peak_bytes / 10)
        if self._why_not:
            notes["rescheduled"] = f"not known: {self._why_not}"
        if other is not None and other.peak_bytes < self.peak_bytes:
            size = format_bytes(other.peak_bytes)
            notes["rescheduled"] = f"{size}, {other.evaluations} evaluations"
        return notes

    def __str__(self) -> str:
        steps, schedule, stored, evaluations = self.columns
        rows = [
            ("steps", steps),
            ("stored", stored),
            ("evaluations", evaluations),
            ("peak memory", format_bytes(self.peak_bytes)),
        ]
        return as_table(f"schedule: {schedule}", [*rows, *self.notes.items()])


@dataclasses.dataclass(eq=False)
class JaxLoop:
    """A scan of JAX, and the scans that take it back.

    Attributes:
        eqn: Its equation.
        scope: The name stacks of that equation, and of those that it is in.
        later: The scans on the way back that read its outputs, and which ones: for the
            number of an input that of an output.
        read: The numbers of the outputs that something else reads.
    """

    eqn: jex.JaxprEqn
    scope: str
    later: list[tuple[jex.JaxprEqn, dict[int, int]]] = dataclasses.field(
        default_factory=list
    )
    read: set[int] = dataclasses.field(default_factory=set)

    @functools.cached_property
    def caller(self) -> tuple[str, Place | None, bool]:
        """The function of JAX, where it is called, and whether by this library."""
        # In a `jax.checkpoint`, JAX forgets this of the one scan, but not of the other.
        of_each = map(_caller, (self.eqn, *(eqn for eqn, _ in self.later)))
        return next((found for found in of_each if found), ("scan", None, False))

    @property
    def residuals(self) -> list[int]:
        """The numbers of the outputs that are stored for the way back."""
        return sorted({i for _, inputs in self.later for i in inputs.values()})

    @property
    def stored_bytes(self) -> int:
        """The bytes of these."""
        return nbytes([aval_of(self.eqn.outvars[i]) for i in self.residuals])

    def plan(self, placed: Sequence[NamedSharding | None]) -> JaxPlan:
        """What it stores, and what it would take otherwise."""
        types = list(map(aval_of, self.eqn.outvars))
        bytes_of = lambda which: nbytes([types[i] for i in which])
        carry = scan_counts(self.eqn.params)[1]
        ys = {i for i in self.read if i >= carry}
        cotangents = bytes_of(i for i in ys if is_inexact(types[i]))
        with unlisted():
            size = temporary_bytes(*self._there_and_back(placed))
            rescheduled, why_not = self._rescheduled(placed)
        return JaxPlan(
            length=self.eqn.params["length"],
            peak_bytes=self.stored_bytes if size is None else size,
            output_bytes=bytes_of(ys.difference(self.residuals)) + cotangents,
            rescheduled=rescheduled,
            _why_not=why_not,
        )

    def _there_and_back(self, placed: Sequence[NamedSharding | None]) -> list[Any]:
        """The loop and the scans that take it back, as a function, and its types."""
        carry, residuals = scan_counts(self.eqn.params)[1], self.residuals
        is_read = [i < carry or i in residuals for i in range(len(self.eqn.outvars))]
        there = pruned(alone(self.eqn), tuple(is_read))
        backs = [
            (pruned(alone(eqn), tuple(map(_is_used, eqn.outvars))), of_loop)
            for eqn, of_loop in self.later
        ]

        def run_both(inputs: list[Value], others: list[list[Value]]) -> list[Value]:
            last, stored = split(run(there, *inputs), carry)
            rows, results = dict(zip(residuals, stored, strict=True)), list(last)
            # What else is read on the way back is given, even if it is made there.
            for (back, of_loop), given in zip(backs, others, strict=True):
                rest = iter(given)
                count = range(len(back.in_avals))
                read = (rows[of_loop[i]] if i in of_loop else next(rest) for i in count)
                results += run(back, *read)
            return results

        pairs = zip(there.in_avals, placed, strict=True)
        others = [
            [aval for i, aval in enumerate(back.in_avals) if i not in of_loop]
            for back, of_loop in backs
        ]
        return [run_both, [_placed(*pair) for pair in pairs], others]

    def _rescheduled(
        self, placed: Sequence[NamedSharding | None]
    ) -> tuple[Plan | None, str]:
        """The plan that it would have; or `None`, and why that is not known."""
        params, program = self.eqn.params, close(self.eqn.params["jaxpr"])
        consts, carry = scan_counts(params)
        is_y = [i in self.read for i in range(carry, len(self.eqn.outvars))]
        # If JAX has left out all that is not stored, this stands for it.
        is_y = is_y if carry or any(is_y) else [True] * len(is_y)
        step = Step(pruned(program, (*[True] * carry, *is_y)), consts, carry)
        axes = (0,) * len(step.x_types)
        loop = Loop(params["length"], reverse=params["reverse"], x_axes=axes)
        groups = tuple(map(tuple, split(placed, consts, carry))) if any(placed) else ()
        try:
            step, loop, groups = form_to_plan(step, loop, groups)
            problem, active, _ = planned(step, loop, _SCHEDULE, None, groups)
            # The way back carries cotangents of what is differentiated.
            nonzeros = tuple(map(self._may_have_cotangent, problem.step.const_types))
            active, _ = activity(problem.step, active._replace(consts=nonzeros))
            layout = problem.layout(active)
            return estimated_plan(_SCHEDULE, problem, active, layout), ""
        # What JAX says of functions without derivatives, and this library after it.
        except (NotImplementedError, TypeError, ValueError) as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            return None, first

    def _may_have_cotangent(self, const: Any) -> bool:
        carried = (
            aval_of(var)
            for eqn, _ in self.later
            for var in eqn.outvars[: scan_counts(eqn.params)[1]]
        )
        kind = const.shape, const.dtype
        return any((aval.shape, aval.dtype) == kind for aval in carried)


def _is_used(var: Any) -> bool:
    return not isinstance(var, jex.DropVar)


def _placed(aval: Any, sharding: NamedSharding | None) -> Any:
    if sharding is None:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def jax_loops(program: AnyJaxpr) -> tuple[dict[int, JaxLoop], dict[int, RuleLoop]]:
    """The scans of JAX that are taken back, and its loops in rules.

    Each by the identity of its equation.
    """
    found, in_rules = _taken_back(program)
    return {key: loop for key, loop in found.items() if not loop.caller[2]}, in_rules


def gradient_loops(program: AnyJaxpr) -> dict[int, JaxLoop | RuleLoop]:
    """The loops of a gradient: those of rules and of the way back are among them."""
    taken_back, in_rules = _taken_back(program)
    found: dict[int, JaxLoop | RuleLoop] = {
        id(eqn): loop for loop in in_rules.values() for eqn in (loop.eqn, *loop.back)
    }
    for loop in taken_back.values():
        found |= {id(eqn): loop for eqn in (loop.eqn, *(eqn for eqn, _ in loop.later))}
    return found


def _taken_back(program: AnyJaxpr) -> tuple[dict[int, JaxLoop], dict[int, RuleLoop]]:
    search, in_rules = _Follower(), rule_loops(program)
    _note_reads(search.walk(program, (), Where()))
    loops = {key: loop for key, loop in search.loops.items() if loop.later}
    return {key: loops[key] for key in loops if key not in in_rules}, in_rules


@dataclasses.dataclass(frozen=True)
class _Stacked:
    """An output of a loop, with a row for each step.

    Attributes:
        loop: The loop.
        output: The number of the output.
        rows: What the rows are, if those are outputs of a loop as well.
    """

    loop: JaxLoop
    output: int
    rows: "_Stacked | None"


def _note_reads(values: Iterable[_Stacked | None]) -> None:
    for value in values:
        while value is not None:
            value.loop.read.add(value.output)
            value = value.rows


class _Follower(AbstractFollower[_Stacked]):
    """Follows the outputs of scans through a program."""

    def __init__(self) -> None:
        self.loops: dict[int, JaxLoop] = {}

    def of_equation(
        self, eqn: jex.JaxprEqn, inputs: list[_Stacked | None], at: Where
    ) -> Sequence[_Stacked | None]:
        if eqn.primitive.name == "scan":
            return self._of_scan(eqn, inputs, at)
        if eqn.primitive.name == "cond":
            _note_reads(inputs[:1])
            inputs = inputs[1:]
        if called := programs_called(eqn):
            return self.of_call(called, inputs, at)
        # It is a while loop, or one of this library, or no program at all.
        _note_reads(inputs)
        for program in programs_in(eqn):
            _note_reads(self.walk(program, (), at))
        return ()

    def _of_scan(
        self, eqn: jex.JaxprEqn, inputs: list[_Stacked | None], at: Where
    ) -> list[_Stacked | None]:
        consts, carry = scan_counts(eqn.params)
        before = consts + carry
        back: dict[JaxLoop, dict[int, int]] = {}
        for i, value in enumerate(inputs[before:], before):
            if value is not None and _goes_back(eqn, at.scope, value.loop):
                back.setdefault(value.loop, {})[i] = value.output
            else:
                _note_reads([value])
        _note_reads(inputs[consts:before])
        for loop, of_loop in back.items():
            # A program that is called twice is walked through twice.
            if not any(eqn is other for other, _ in loop.later):
                loop.later.append((eqn, of_loop))
        rows = [None if value is None else value.rows for value in inputs[before:]]
        given = [*inputs[:consts], *[None] * carry, *rows]
        found = self.walk(eqn.params["jaxpr"], given, at)
        _note_reads(found[:carry])
        loop = self.loops.setdefault(id(eqn), JaxLoop(eqn, at.scope))
        ys = [_Stacked(loop, i, found[i]) for i in range(carry, len(found))]
        return [*[None] * carry, *ys]


def _goes_back(eqn: jex.JaxprEqn, scope: str, loop: JaxLoop) -> bool:
    """Whether a scan is on the way back of a loop, whose outputs it reads."""
    if eqn.params["length"] != loop.eqn.params["length"]:
        return False
    # JAX may have forgotten the place of a loop in a `jax.checkpoint`.
    if place_of(loop.eqn.source_info) not in (place_of(eqn.source_info), None):
        return False
    return is_later(scope, loop.scope)


def _caller(eqn: jex.JaxprEqn) -> tuple[str, Place | None, bool] | None:
    """See `JaxLoop.caller`; `None` if it is not known of this equation."""
    name = loop_of_jax(eqn)
    for frame in frames_of(eqn.source_info):
        if not frame.file_name.startswith(JAX_FILES):
            is_ours = frame.file_name.startswith(OUR_FILES)
            return name, place_of(eqn.source_info), is_ours
    return None
