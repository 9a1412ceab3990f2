"""Cuts the program of a function into parts: loops, and what lies between them.

What lies between loops is cut where few values are alive, such as between two layers.
"""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias, TypeVar

import jax
import jax.extend.core as jex

from .._arrays import Flags, nbytes
from .._compat import form_of
from .._programs import (
    Place,
    aval_of,
    formula_of,
    loop_name,
    map_programs,
    owner_of,
    place_of,
    program_from,
    with_equations,
)
from ..checkpointing import LoopSchedule, is_left_open, with_schedule
from ._by_rows import ByRows
from ._ranges import ranges_of
from ._rules import differentiated, rule_with_loops, with_rule_program

_T = TypeVar("_T")

# Which operations can be run some rows at a time: none of them, those around large
# values, or all that is along one dimension.
Split: TypeAlias = Literal["nowhere", "ranges", "dimension"]

# The fewest equations of a part, and the most parts that straight code is cut into.
_FEWEST, _MOST = 4, 128
# What stays by itself, since it holds programs that may take much memory.
_ALONE = ("scan", "while", "cond", "shard_map", "remat2", "call_hi_primitive")


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive equations of a program.

    Attributes:
        reads: The variables that they read, and others define.
        gives: The variables that they define, and others read.
        loops: The loops that are left open, if it is one or holds some.
        by_rows: How to run it some rows at a time, if that can be.
        inner: If it has rows, its own parts, and those of a chunk.
        split: How they were found.
    """

    eqns: tuple[jex.JaxprEqn, ...]
    reads: tuple[jex.Var, ...]
    gives: tuple[jex.Var, ...]
    loops: "tuple[OpenLoop, ...]" = ()
    by_rows: ByRows | None = None
    inner: "tuple[Part, ...]" = ()
    split: Split = "nowhere"

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop that is left open, or one equation that holds some."""
        return bool(self.loops) and self.by_rows is None

    @property
    def program(self) -> jex.ClosedJaxpr:
        """The part as a program, from what it reads to what it gives."""
        return program_from(self.eqns, self.reads, self.gives)

    @property
    def place(self) -> Place | None:
        """Where it is in the user's program: its first loop, or its first equation."""
        eqns = (*(loop.eqn for loop in self.loops), *self.eqns)
        return next(filter(None, (place_of(e.source_info) for e in eqns)), None)

    @property
    def name(self) -> str:
        """Its loop, or else the layer or function that computes most of it."""
        if self.loop_name is not None:
            return self.loop_name
        made = Counter[str]()
        for eqn in self.eqns:
            owner = owner_of(eqn.source_info) or "code"
            made[owner] += nbytes(list(map(aval_of, eqn.outvars)))
        return made.most_common(1)[0][0]

    @property
    def loop_name(self) -> str | None:
        """The name of its first loop, if it has one."""
        of = lambda loop: loop_name(loop.eqn.source_info.name_stack)
        return of(self.loops[0]) if self.loops else None

    @property
    def has_effects(self) -> bool:
        """Whether it does something that must not be done again."""
        return any(e.effects for e in self.eqns)


@dataclasses.dataclass(frozen=True)
class OpenLoop:
    """A loop that is left open, somewhere in an equation.

    Attributes:
        eqn: Its own equation.
        times: How often it is run, for all that is known.
        abreast: Of how many of these runs what they store is there at once.
        is_kept: Whether that is kept until the way back, or it is run again there.
        marks: Which of its inputs are differentiated, if that is known.
        split_by: The equation of a `jax.shard_map` that it is in, if it is in one.
    """

    eqn: jex.JaxprEqn
    times: int = 1
    abreast: int = 1
    is_kept: bool = True
    marks: Flags | None = None
    split_by: jex.JaxprEqn | None = None

    def inside(self, eqn: jex.JaxprEqn) -> "OpenLoop":
        """An equation in a program of this one, and how often it is run in all."""
        own, form = self.eqn, form_of(self.eqn)
        if form == "scan":
            length = own.params["length"]
            counts = dict(times=self.times * length, abreast=self.abreast * length)
            return dataclasses.replace(self, eqn=eqn, marks=None, **counts)
        if form == "shard_map":
            return dataclasses.replace(self, eqn=eqn, marks=None, split_by=own)
        formula = formula_of(own)
        if formula is None and form != "remat2":
            return dataclasses.replace(self, eqn=eqn, marks=None)
        # A map runs a chunk again, and a loop a step: they take one of them at a time.
        times = self.times * (1 if formula is None else formula.times)
        return OpenLoop(eqn, times, is_kept=False, split_by=self.split_by)

    def on_device(self, f: Callable[[], _T]) -> _T:
        """Calls a function where the axes of devices have their names."""
        if self.split_by is None:
            return f()
        found, params = list[_T](), self.split_by.params

        def mapped() -> tuple[()]:
            found.append(f())
            return ()

        traced = jax.shard_map(
            mapped,
            mesh=params["mesh"],
            in_specs=(),
            out_specs=(),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        jax.eval_shape(traced)
        return found[0]


def open_loops(eqn: jex.JaxprEqn) -> tuple[OpenLoop, ...]:
    """The loops that are left open: an equation itself, or those that it holds."""
    found = list[OpenLoop]()

    def note(loop: OpenLoop) -> jex.JaxprEqn:
        found.append(loop)
        return loop.eqn

    _at_open_loops(OpenLoop(eqn), note)
    return tuple(found)


def with_schedules(part: Part, schedules: Sequence[LoopSchedule]) -> Part:
    """The part with a schedule for each of its loops."""
    left = iter(schedules)
    taken = lambda loop: with_schedule(loop.eqn, next(left))
    eqns = tuple(_at_open_loops(OpenLoop(eqn), taken) for eqn in part.eqns)
    return dataclasses.replace(part, eqns=eqns)


def _at_open_loops(
    one: OpenLoop, change: Callable[[OpenLoop], jex.JaxprEqn]
) -> jex.JaxprEqn:
    eqn = one.eqn
    if is_left_open(formula := formula_of(eqn)):
        return change(one)
    if (rule := rule_with_loops(eqn)) is not None:
        return _at_loops_of_rule(one, rule, change)
    # Others decide what is stored in a function with derivative rules, or a `Fit`.
    if form_of(eqn).startswith("custom_") or getattr(formula, "is_decided", False):
        return eqn

    def inside(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        inner = map(one.inside, program.jaxpr.eqns)
        eqns = [_at_open_loops(each, change) for each in inner]
        is_same = all(map(operator.is_, eqns, program.jaxpr.eqns))
        return program if is_same else with_equations(program, eqns)

    return map_programs(eqn, inside)


def _at_loops_of_rule(
    one: OpenLoop, rule: jex.ClosedJaxpr, change: Callable[[OpenLoop], jex.JaxprEqn]
) -> jex.JaxprEqn:
    """Changes open loops in the rule of a `jax.custom_jvp`, which is run instead."""
    # Its tangents are transposed on the way back: there all of it is run.
    at = lambda eqn, marks: OpenLoop(eqn, one.times, 1, False, marks, one.split_by)
    marks = differentiated(rule, one.eqn)
    eqns = [
        _at_open_loops(at(eqn, flags), change) if any(flags) else eqn
        for eqn, flags in zip(rule.jaxpr.eqns, marks, strict=True)
    ]
    new = with_equations(rule, eqns)
    return one.eqn if new is rule else with_rule_program(one.eqn, new)


def parts_of(program: jex.ClosedJaxpr, split: Split = "nowhere") -> list[Part]:
    """The parts of a program in which nothing is called, in their order."""
    none = [(eqn, None) for eqn in program.jaxpr.eqns]
    units = none if split == "nowhere" else ranges_of(program, split == "dimension")
    eqns, by_rows = [list(each) for each in zip(*units, strict=True)] or [[], []]
    program = with_equations(program, eqns)
    loops = list(map(open_loops, eqns))
    bounds = list(_bounds(program, list(map(bool, loops)), by_rows))
    last = _last_uses(program)
    parts = list[Part]()
    for start, stop in bounds:
        own = eqns[start:stop]
        if (rows := by_rows[start]) is not None:
            read, gives = (
                dict.fromkeys(x for x, _ in xs) for xs in (rows.inputs, rows.outs)
            )
            inside = tuple(loop for eqn in rows.eqns for loop in open_loops(eqn))
            part = Part(rows.eqns, (*read,), (*gives,), inside, rows, split=split)
            inner = tuple(parts_of(part.program))
            parts.append(dataclasses.replace(part, inner=inner))
            continue
        # Parts by rows may make the same values once more.
        made = dict.fromkeys(x for eqn in own for x in eqn.outvars)
        every = (x for eqn in own for x in eqn.invars if isinstance(x, jex.Var))
        read = dict.fromkeys(x for x in every if x not in made)
        gives = [x for x in made if last.get(x, -1) >= stop]
        parts.append(Part(tuple(own), tuple(read), tuple(gives), loops[start]))
    return parts


def part_at_once(program: jex.ClosedJaxpr) -> Part:
    """A whole program as a part."""
    jaxpr = program.jaxpr
    made = {x for eqn in jaxpr.eqns for x in eqn.outvars}
    gives = dict.fromkeys(x for x in jaxpr.outvars if x in made)
    return Part(tuple(jaxpr.eqns), (*jaxpr.constvars, *jaxpr.invars), (*gives,))


def _last_uses(program: jex.ClosedJaxpr) -> dict[jex.Var, int]:
    """The last equation that reads each variable; beyond them all for an output."""
    last: dict[jex.Var, int] = {}
    for i, eqn in enumerate(program.jaxpr.eqns):
        last.update((x, i) for x in eqn.invars if isinstance(x, jex.Var))
    count = len(program.jaxpr.eqns)
    outs = (x for x in program.jaxpr.outvars if isinstance(x, jex.Var))
    return last | dict.fromkeys(outs, count)


def _bounds(
    program: jex.ClosedJaxpr,
    is_open: Sequence[bool],
    by_rows: Sequence[ByRows | None],
) -> Iterator[tuple[int, int]]:
    """Where parts begin and end."""
    eqns = program.jaxpr.eqns
    alive = _bytes_alive(program)
    start = 0
    for i, eqn in enumerate(eqns):
        alone = is_open[i] or eqn.effects or form_of(eqn) in _ALONE
        if i >= start and (alone or by_rows[i]):
            yield from _cut(eqns, alive, start, i)
            rows = by_rows[i]
            start = i + (1 if rows is None else len(rows.eqns))
            yield i, start
    yield from _cut(eqns, alive, start, len(eqns))


def _bytes_alive(program: jex.ClosedJaxpr) -> list[int]:
    """The bytes of values that are alive before each equation, without the inputs."""
    last = _last_uses(program)
    count = len(program.jaxpr.eqns)
    change = [0] * (count + 2)
    for i, eqn in enumerate(program.jaxpr.eqns):
        for x in eqn.outvars:
            if (end := last.get(x, i)) > i:
                size = nbytes([aval_of(x)])
                change[i + 1] += size
                change[min(end, count) + 1] -= size
    alive, total = list[int](), 0
    for i in range(count + 1):
        total += change[i]
        alive.append(total)
    return alive


def _cut(
    eqns: Sequence[jex.JaxprEqn], alive: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, int]]:
    """Cuts straight code so that it takes the least memory to run it part by part."""
    # That is what is alive at the cuts, and what the largest part computes.
    if stop <= start:
        return
    made = [nbytes(list(map(aval_of, eqn.outvars))) for eqn in eqns[start:stop]]
    whole = sum(made)
    best, least = [(start, stop)], math.inf
    count = 1
    while count <= min(_MOST, max((stop - start) // _FEWEST, 1)):
        found = _cut_into(made, alive, start, stop, whole / count)
        takes = sum(alive[low] for low, _ in found[1:])
        takes += max(sum(made[low - start : high - start]) for low, high in found)
        if takes <= least:
            best, least = found, takes
        count = max(count + 1, count * 5 // 4)
    yield from best


def _cut_into(
    made: Sequence[int], alive: Sequence[int], start: int, stop: int, most: float
) -> list[tuple[int, int]]:
    """Parts that compute about so many bytes, cut where the fewest are alive."""
    found, low = list[tuple[int, int]](), start
    while low < stop:
        total, high = 0.0, low
        while high < stop and (total < 1.5 * most or high - low < _FEWEST):
            total += made[high - start]
            high += 1
        if high < stop:
            # The latest of the best places in the second part of the window.
            middle = low + max(_FEWEST, (high - low) // 3)
            places = range(min(middle, high), high + 1)
            high = min(places, key=lambda i: (alive[i], -i))
        found.append((low, high))
        low = high
    return found
