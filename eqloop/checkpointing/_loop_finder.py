"""Finds the loops in a traced program, and what they take at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._arrays import Flags, is_inexact, nbytes, pick, split
from .._compat import form_of
from .._device import planning_device
from .._programs import (
    Formula,
    Place,
    RuleAround,
    Selected,
    Vmapped,
    aval_of,
    equations,
    folders_of,
    formula_of,
    loop_name,
    loop_of_jax,
    place_of,
    programs_in,
    temporary_bytes,
)
from .._types import AnyJaxpr, Value
from ._jax_loops import JaxLoop, JaxPlan, jax_loops
from ._loop_plans import LoopPlan
from ._plan import Plan, estimated_plan
from ._rule_loops import RuleLoop
from ._schedules import AbstractSchedule
from ._while_plan import WhilePlan, while_plan_of
from .engine._forward import Active
from .engine._layout import AbstractLayout, Layout
from .engine._listing import Decided, Listed, unlisted
from .engine._planned_loop import PlannedLoop, Reverse
from .engine._problem import Placements, Problem
from .engine._transformed import activity, all_active, unsettled, without_stored
from .planning._memory import Maps, with_a_little_more
from .steps._step import Step
from .whiles._online import Online
from .whiles._stopping import UntilStopped

# What is a loop, or may have one in its rules alone.
_MAY_LOOP = ("scan", "while", "custom_vjp_call")
# What a transposition is after these is no other array in memory.
_OF_ROWS = ("reshape", "copy")


@dataclasses.dataclass
class FoundLoops:
    """What was found in a program, or in an equation.

    Attributes:
        loops: The loops.
        peak: The most bytes that they take at once.
        left: What takes memory behind it: bytes, and the numbers of the outputs that
            hold them.
    """

    loops: list[LoopPlan] = dataclasses.field(default_factory=list)
    peak: int = 0
    left: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class LoopFinder:
    """Finds loops in programs.

    Attributes:
        known: The layouts in these programs, by the identity of their stand-ins, see
            `engine/_listing.py`. There are more of them as programs are traced.
        lists_jax: Whether to list JAX's own loops.
        reversed: What takes loops back, by the identity of their layouts. Others
            belong to loops that a gradient was asked of, and that it does not go
            through after all: their outputs have no cotangents.
        of_jax: JAX's own loops that are reversed, by the identity of their equations.
        of_rules: JAX's own loops of which rules store anything, in the same way.
        kept: What these store: for the identity of the equation that makes it, as
            `FoundLoops.left`.
        run_as: What the loops in `of_jax` are in the program that will be run, if that
            is another one.
        placed: How variables are split over automatic axes, by their identity: inputs
            of `f`, also where they are handed on. Of others it is not known.
        read: The variables that something reads, by their identity.
        transposed: Those that are transpositions, in the same way.
    """

    known: Listed
    lists_jax: bool
    reversed: dict[int, jex.JaxprEqn] = dataclasses.field(default_factory=dict)
    of_jax: dict[int, JaxLoop] = dataclasses.field(default_factory=dict)
    of_rules: dict[int, RuleLoop] = dataclasses.field(default_factory=dict)
    kept: dict[int, list[tuple[int, list[int]]]] = dataclasses.field(
        default_factory=dict
    )
    run_as: dict[int, JaxLoop] = dataclasses.field(default_factory=dict)
    placed: dict[int, NamedSharding | None] = dataclasses.field(default_factory=dict)
    read: set[int] = dataclasses.field(default_factory=set)
    transposed: set[int] = dataclasses.field(default_factory=set)

    def look_into(self, program: AnyJaxpr) -> None:
        """Takes note of the loops in a program that is to be searched."""
        self.reversed.update(_reversed_in(program))
        if self.lists_jax:
            found, in_rules = jax_loops(program)
            self.of_jax.update(found)
            self.of_rules.update(in_rules)
            for loop in in_rules.values():
                for (maker, output), aval in loop.kept.items():
                    kept = self.kept.setdefault(maker, [])
                    kept.append((nbytes([aval]), [output]))

    def has_stand_ins(self, loop: JaxLoop) -> bool:
        """Whether JAX's own loop has a stand-in for a loop that stores residuals."""
        programs = (eqn.params["jaxpr"] for eqn, _ in loop.later)
        keys = (key for program in programs for key, _ in _reversed_in(program))
        found = filter(None, map(self.known.get, keys))
        return any(decided.layout.stores_residuals for decided in found)

    def see_run(self, program: AnyJaxpr) -> None:
        """Takes JAX's own loops from the program that will be run, without stand-ins.

        They are in the same order there.
        """
        found, _ = jax_loops(program)
        if len(found) == len(self.of_jax):
            self.run_as.update(zip(self.of_jax, found.values(), strict=True))

    def split_as(
        self, program: AnyJaxpr, shardings: Sequence[NamedSharding | None]
    ) -> None:
        """Takes note of how the inputs of a program are split."""
        variables = getattr(program, "jaxpr", program).invars
        self.placed.update(zip(map(id, variables), shardings, strict=True))

    def of_program(
        self, program: AnyJaxpr, depth: int, around: Place | None
    ) -> "FoundLoops":
        """The loops in a program, and the most bytes that they take at once.

        It is inside of `depth` loops, and called at the place `around`, if known.
        """
        jaxpr = program.jaxpr if isinstance(program, jex.ClosedJaxpr) else program
        reading = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
        last = {id(var): i for i, each in enumerate(reading) for var in each}
        self.read.update(last)
        loops: list[LoopPlan] = []
        live: list[tuple[int, int, int]] = []  # from one equation to another, and bytes
        inner: list[int] = []
        place_of_output = {id(var): i for i, var in enumerate(jaxpr.outvars)}
        left: list[tuple[int, list[int]]] = []
        for i, eqn in enumerate(jaxpr.eqns):
            name = eqn.primitive.name
            if name == "transpose" or (name in _OF_ROWS and self._transposed(eqn)):
                self.transposed.update(map(id, eqn.outvars))
            found = self._of_equation(eqn, depth, around)
            loops += found.loops
            inner.append(found.peak)
            for size, outputs in found.left + self.kept.get(id(eqn), []):
                slots = [eqn.outvars[output] for output in outputs]
                end = max((last.get(id(var), i) for var in slots), default=i)
                live.append((i + 1, end, size))
                ids = [id(var) for var in slots if id(var) in place_of_output]
                left += [(size, [place_of_output[x] for x in ids])] if ids else []
        at = lambda i: sum(size for first, last, size in live if first <= i <= last)
        peak = max((at(i) + peak for i, peak in enumerate(inner)), default=0)
        return FoundLoops(loops, peak, left)

    def _of_equation(
        self, eqn: jex.JaxprEqn, depth: int, around: Place | None
    ) -> "FoundLoops":
        # Diffrax calls the loops of our adjoint; the user's line is the one that calls
        # Diffrax. JAX keeps only a few frames for each equation, so that line may only
        # be known for the call around it.
        place = place_of(eqn.source_info, through=folders_of("diffrax")) or around
        formula = formula_of(eqn)
        loop, maps = _unwrapped(formula)
        if isinstance(loop, PlannedLoop) and loop.saves is not None:
            if id(loop.saves.layout) not in self.reversed:
                return FoundLoops()
            carry, ys, stored = loop.out_aval
            ends = len(carry), len(carry) + len(ys)
            counts = [sum(i < end for i in _outputs(formula)) for end in ends]
            _, ys, slots = split(eqn.outvars, counts[0], counts[1] - counts[0])
            if stored.flat and not slots:
                return FoundLoops()  # its tangents alone, and nothing is stored of it
            placed = () if maps else self._placements(loop.problem.step, eqn)
            layout = loop.saves.layout
            plan, batch = self._plan(loop.problem, layout, maps, placed)
            back = self.reversed[id(layout)]
            if is_second := _is_derived(back):
                plan = _compiled(plan, back, nbytes(map(aval_of, slots)))
            name = loop_name(eqn.source_info.name_stack) or "loop"
            size = plan.peak_bytes
            # What is read has cotangents.
            read = [var.aval for var in ys if id(var) in self.read]
            given = nbytes(read) + nbytes(filter(is_inexact, read))
            # Other devices read them where they lie.
            is_cpu = planning_device().platform == "cpu"
            copied = nbytes(map(aval_of, self._transposed(eqn))) if is_cpu else 0
            about = name, place, plan, batch, depth, is_second, given, copied
            left = list(range(counts[1], len(eqn.outvars)))
            size += copied
            return FoundLoops([LoopPlan(*about)], size, [(size, left)])
        if formula is not None:
            if isinstance(loop, Reverse) and loop.given is None:
                # The derivative of a way back runs and stores its loop itself.
                # Its inputs start with those of the loop.
                count = sum(map(len, loop.in_avals[0]))
                maps = tuple((axis, dims[:count]) for axis, dims in maps)
                plan, batch = self._plan(loop.problem, loop.layout, maps, ())
                plan = _compiled(plan, eqn, 0)
                name = loop_name(eqn.source_info.name_stack) or "loop"
                is_second = _is_derived(eqn)
                whole = LoopPlan(name, place, plan, batch, depth, is_second)
                inside = self._of_formula(formula, True, depth, place).loops
                return FoundLoops([whole, *inside], plan.peak_bytes)
            return self._of_formula(formula, isinstance(loop, Reverse), depth, place)
        if (scan := self.of_jax.get(id(eqn))) is not None:
            plan = self.run_as.get(id(eqn), scan).plan(self._shardings(eqn))
            name, where, _ = scan.caller
            loops = [LoopPlan(f"lax.{name}", where or place, plan, 1, depth)]
            later = (eqn for eqn, _ in scan.later if id(eqn) not in self.of_jax)
            for eqn in (scan.eqn, *later):
                body = eqn.params["jaxpr"]
                loops += self.of_program(body, depth + 1, place).loops
            return FoundLoops(
                loops, plan.peak_bytes, [(plan.peak_bytes, scan.residuals)]
            )
        if any(eqn is back for scan in self.of_jax.values() for back, _ in scan.later):
            return FoundLoops()  # listed with the loop that it takes back
        inside = FoundLoops()
        if (in_rule := self.of_rules.get(id(eqn))) is not None:
            length, size = eqn.params.get("length"), in_rule.stored_bytes
            kind, where = in_rule.rule
            plan = JaxPlan(length, size, 0, None, RuleAround(kind, where or place))
            name = f"lax.{loop_of_jax(eqn)}"
            inside.loops.append(LoopPlan(name, place, plan, 1, depth))
            inside.peak, depth = size, depth + 1
        for program in programs_in(eqn):
            jaxpr = getattr(program, "jaxpr", program)
            # A call hands on what it is given, and a `jax.shard_map` does not.
            if _types(jaxpr.invars) == _types(eqn.invars):
                self.split_as(program, self._shardings(eqn))
                self._hand_on(eqn.invars, jaxpr.invars)
            look = functools.partial(self.of_program, program, depth, place)
            found = _within(eqn, look)
            is_call = _types(jaxpr.outvars) == _types(eqn.outvars)
            if is_call:
                self._hand_on(jaxpr.outvars, eqn.outvars)
            inside.loops += found.loops
            inside.left += found.left if is_call else []
            inside.peak = max(inside.peak, found.peak)
        return inside

    def _of_formula(
        self, formula: Formula, is_loop: bool, depth: int, around: Place | None
    ) -> "FoundLoops":
        # This traces the formula, which decides on the layouts of inner loops.
        if not _has_loops(formula):
            return FoundLoops()
        program = formula.expanded
        self.look_into(program)
        found = self.of_program(program, depth + is_loop, around)
        # The bytes of the loop itself include these.
        return FoundLoops(found.loops, 0 if is_loop else found.peak)

    def _transposed(self, eqn: jex.JaxprEqn) -> list[Value]:
        """The inputs of an equation that are transpositions."""
        return [var for var in eqn.invars if id(var) in self.transposed]

    def _hand_on(self, given: Sequence[Value], taken: Sequence[Value]) -> None:
        pairs = zip(given, taken, strict=True)
        self.transposed.update(id(b) for a, b in pairs if id(a) in self.transposed)

    def _shardings(self, eqn: jex.JaxprEqn) -> list[NamedSharding | None]:
        return [self.placed.get(id(var)) for var in eqn.invars]

    def _placements(self, step: Step, eqn: jex.JaxprEqn) -> Placements:
        """How the inputs of a loop are split, if it is known of any."""
        found = self._shardings(eqn)
        if not any(found) or len(found) != len(step.jaxpr.in_avals):
            return ()
        return tuple(map(tuple, split(found, step.num_consts, step.num_carry)))

    def _plan(
        self,
        problem: Problem[Any],
        layout: AbstractLayout,
        maps: Maps,
        placed: Placements,
    ) -> tuple[Plan | WhilePlan, int]:
        """The plan of a loop, and how many examples run in it."""
        # What it stores of its last steps is a part of the layout.
        # What a rule put in place of a function may have no derivative itself.
        problem = without_stored(unsettled(problem))
        # A layout that is not listed is that of a second derivative, which is planned
        # for all of its inputs.
        of_all = Decided(layout, layout, all_active(problem.step))
        decided = self.known.get(id(layout), of_all)
        active = _fitting(decided.active, problem)
        undifferentiated = _undifferentiated_fitting(decided.undifferentiated, problem)
        problem = dataclasses.replace(
            problem, undifferentiated=undifferentiated, placed=placed
        )
        batch = math.prod((problem.loop.batch, *(axis.size for axis, _ in maps)))
        with unlisted():
            return _plan_of(problem, active, decided.layout, maps), batch


def _is_derived(back: jex.JaxprEqn) -> bool:
    """Whether what takes a loop back is the derivative of a gradient."""
    formula = formula_of(back)
    assert formula is not None
    loop, _ = _unwrapped(formula)
    return isinstance(loop, Reverse) and bool(loop.back.changes)


def _compiled(
    plan: Plan | WhilePlan, back: jex.JaxprEqn, stored: int
) -> Plan | WhilePlan:
    """The plan of a second derivative, with the bytes of its way back as it is."""
    # `peak_bytes` knows first derivatives: in those, blocks have residuals.
    with unlisted():
        run = lambda *inputs: back.primitive.bind(*inputs, **back.params)
        size = temporary_bytes(run, *map(aval_of, back.invars))
    if size is None:
        return plan
    return dataclasses.replace(plan, peak_bytes=with_a_little_more(stored + size))


def _unwrapped(formula: Formula) -> tuple[Formula, Maps]:
    """The formula within selections and `vmap`s, and these `vmap`s."""
    maps: Maps = ()
    while isinstance(formula, Selected | Vmapped):
        if isinstance(formula, Vmapped):
            maps = ((formula.axis_data, formula.dims), *maps)
        formula = formula.formula
    return formula, maps


def _outputs(formula: Formula) -> list[int]:
    """Which outputs of the formula within selections and `vmap`s there are."""
    if isinstance(formula, Selected):
        return pick(_outputs(formula.formula), formula.shown)
    if isinstance(formula, Vmapped):
        return _outputs(formula.formula)
    return list(range(len(formula.out_avals_flat)))


def _plan_of(
    problem: Problem, active: Active, layout: AbstractLayout, maps: Maps
) -> Plan | WhilePlan:
    if isinstance(layout, Online):
        assert isinstance(problem, UntilStopped)
        return while_plan_of(problem, active, layout, maps)
    schedule = problem.planner
    assert isinstance(layout, Layout)
    assert isinstance(schedule, AbstractSchedule)
    counted = problem.as_planned
    layout = layout.by_carries() if problem.loop.stops else layout
    return estimated_plan(schedule, counted, active, layout)


def _fitting(active: Active, problem: Problem) -> Active:
    """The marks of a loop that was changed since its layout was decided.

    A joint loop of a batch has more consts, and one more leaf at the start of its
    carry. Another loop may have lost leaves of the carry that nothing reads; then all
    leaves that are left count as differentiated, and all inputs of one with tangents.
    """
    step = problem.step
    if len(active.xs) != len(step.x_types):
        return all_active(step)
    more = step.num_consts - len(active.consts)
    before = step.num_carry - len(active.carry)
    if before < 0:
        whole_carry = active._replace(carry=(True,) * step.num_carry)
        return activity(step, whole_carry)[0]
    return active._replace(
        consts=(*active.consts, *[False] * more),
        carry=(*[False] * before, *active.carry),
    )


def _undifferentiated_fitting(undifferentiated: Flags, problem: Problem) -> Flags:
    """Which leaves of the carry of this problem are not differentiated."""
    count = problem.step.num_carry
    if not undifferentiated or len(undifferentiated) > count:
        return (True,) * count if undifferentiated else ()
    return (*[False] * (count - len(undifferentiated)), *undifferentiated)


def _within(eqn: jex.JaxprEqn, look: Callable[[], FoundLoops]) -> FoundLoops:
    """What is found in the program of an equation.

    Plans trace loops. In a `jax.shard_map` they do so within one that has its axes.
    """
    if eqn.primitive.name != "shard_map":
        return look()
    found: list[FoundLoops] = []
    axes = eqn.params["newly_manual_axes"]
    mapped = jax.shard_map(
        lambda: found.append(look()),
        mesh=eqn.params["mesh"],
        in_specs=(),
        out_specs=None,
        axis_names=axes,
    )
    jax.eval_shape(mapped)
    return found[0]


def _types(atoms: Sequence[Value]) -> list[Value]:
    return [atom.aval for atom in atoms]


def _reversed_in(program: AnyJaxpr) -> Iterator[tuple[int, jex.JaxprEqn]]:
    """What takes loops back in a program, by the identity of their layouts."""
    for eqn in equations(program):
        if (formula := formula_of(eqn)) is not None:
            inner, _ = _unwrapped(formula)
            if isinstance(inner, Reverse):
                yield id(inner.layout), eqn


def _has_loops(formula: Formula) -> bool:
    """Whether there are loops in the programs of a formula."""
    return any(
        formula_of(eqn) is not None or form_of(eqn) in _MAY_LOOP
        for program in formula.jaxprs
        for eqn in equations(program)
    )
