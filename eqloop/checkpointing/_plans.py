"""The plans of all loops in a function, as they will run."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import equinox as eqx
import jax.extend.core as jex
from jax.sharding import NamedSharding

from .._arrays import Flags, automatic_shardings, split
from .._calls import format_bytes
from .._device import DeviceLike, planning_for_if_given
from .._programs import (
    Formula,
    Place,
    Selected,
    Vmapped,
    equations,
    folders_of,
    formula_of,
    loop_name,
    place_of,
    programs_in,
)
from .._types import AnyJaxpr, PyTree, Value
from ._plan import Plan, estimated_plan
from ._schedules import AbstractSchedule
from ._while_plan import WhilePlan, while_plan_of
from .engine._forward import Active
from .engine._layout import AbstractLayout, Layout
from .engine._listing import Decided, listing, unlisted
from .engine._primitive import PlannedLoop, Reverse
from .engine._problem import Placements, Problem, activity, all_active
from .engine._step import Step
from .planning._memory import Maps
from .whiles._while_layout import AbstractWhileLayout


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One of the loops of a function.

    Attributes:
        name: The transform that the loop is of.
        place: Where it is called, if that is known.
        plan: Its plan, for the whole batch if it is batched. The plan of a while loop
            has no `relative_time`. Its `length` and `evaluations` are for the greatest
            number of steps that it may run, and `None` if there is no bound.
        batch: How many examples run in it side by side.
        depth: How many of the other loops it is inside of.
    """

    name: str
    place: Place | None
    plan: Plan | WhilePlan
    batch: int
    depth: int


@dataclasses.dataclass(frozen=True)
class Plans(Sequence[LoopPlan]):
    """The loops of a function. An inner loop follows the loop that it is in.

    Attributes:
        loops: The loops.
        peak_bytes: The bytes that their gradients allocate at once, if each takes as
            much as its plan says from its forward pass to its backward pass. The bytes
            of a loop within another one are included in those of the outer one.
    """

    loops: tuple[LoopPlan, ...]
    peak_bytes: int

    def __len__(self) -> int:
        return len(self.loops)

    @overload
    def __getitem__(self, index: int) -> LoopPlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LoopPlan, ...]: ...
    def __getitem__(self, index: int | slice) -> LoopPlan | tuple[LoopPlan, ...]:
        return self.loops[index]

    def __str__(self) -> str:
        head = ("loop", "steps", "batch", "schedule", "stored", "evaluations", "memory")
        rows = [head, *map(_row, self.loops)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        places = (f"  {loop.place or 'somewhere'}" for loop in self.loops)
        body = [line for pair in zip(lines[1:], places, strict=True) for line in pair]
        total = f"at once: {format_bytes(self.peak_bytes)}"
        return "\n".join([lines[0], *body, total])


def plans(
    f: Callable[..., PyTree], *, device: DeviceLike | None = None
) -> Callable[..., Plans]:
    """Finds the plans of all loops in a function, without running it.

    The function is traced. The result lists every loop of this library that is
    differentiated in reverse mode, with the plan that it will run: for its batch,
    whether the `vmap` is inside or outside of the gradient, and for the inputs that are
    differentiated. A loop that is not differentiated has no plan, and is not listed.
    While loops are listed as well; their plan is for the greatest number of steps that
    they may run. The loops of
    [`CheckpointedAdjoint`][eqloop.diffrax.CheckpointedAdjoint] are listed at the line
    that calls `diffeqsolve`.

    Args:
        f: Any function that takes a gradient, a training step for example.
        device: What the plans are for, as for [`planning_for`][eqloop.planning_for]:
            by default, the device on which `f` would run.

    Returns:
        A function of the arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for
        an array. It returns a sequence of loops, each with its `plan`, the `name` of
        the transform, its `place` in the program, its `batch`, and its `depth` in other
        loops. Bytes are those of one device, where the arguments say how arrays are
        split over several. `peak_bytes` is what they take at once. Printed, it is a
        table.

    Raises:
        TypeError: If `f` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(w, xs):
        ...     scan = el.CheckpointedScan(lambda h, x: (jnp.sin(w * h + x), None))
        ...     return scan(0.0, xs)[0]
        >>> gradients = jax.vmap(jax.grad(loss), (None, 0))
        >>> found = el.plans(gradients)(1.0, jnp.zeros((8, 256)))
        >>> found[0].plan.levels, found[0].batch
        (((16, 16),), 8)
        >>> print(found)
        loop              steps  batch  schedule           stored ...
        CheckpointedScan  256    8      Recursive(base=16) 32 carries ...
          ...
        at once: ...
    """
    if not callable(f):
        raise TypeError(f"plans: `f` must be callable, but {f!r} is not.")

    @functools.wraps(f)
    def find(*args: PyTree, **kwargs: PyTree) -> Plans:
        with planning_for_if_given(device), listing() as decided:
            program, _, _ = eqx.filter_make_jaxpr(f)(*args, **kwargs)
            known = {id(d.stands_for_it): d for d in decided}
            finder = _Finder(known, decided, set(_reversed_in(program)))
            finder.split_as(program, automatic_shardings((args, kwargs)))
            loops, peak = finder.of_program(program, 0, None)
        return Plans(tuple(loops), peak)

    return find


@dataclasses.dataclass(frozen=True)
class _Finder:
    """Finds loops in programs.

    Attributes:
        known: The layouts in these programs, by the identity of their stand-ins, see
            `engine/_listing.py`.
        decided: The list to which layouts are added while programs are traced.
        reversed: The identities of the layouts by which loops are reversed. Others
            belong to loops that a gradient was asked of, and that it does not go
            through after all: their outputs have no cotangents.
        placed: How variables are split over automatic axes, by their identity: inputs
            of `f`, also where they are handed on. Of others it is not known.
    """

    known: dict[int, Decided]
    decided: list[Decided]
    reversed: set[int]
    placed: dict[int, NamedSharding | None] = dataclasses.field(default_factory=dict)

    def split_as(
        self, program: AnyJaxpr, shardings: Sequence[NamedSharding | None]
    ) -> None:
        """Takes note of how the inputs of a program are split."""
        variables = getattr(program, "jaxpr", program).invars
        self.placed.update(zip(map(id, variables), shardings, strict=True))

    def of_program(
        self, program: AnyJaxpr, depth: int, around: Place | None
    ) -> tuple[list[LoopPlan], int]:
        """The loops in a program, and the most bytes that they take at once.

        Args:
            program: The program.
            depth: How many loops it is inside of.
            around: The place where it is called.
        """
        jaxpr = program.jaxpr if isinstance(program, jex.ClosedJaxpr) else program
        loops: list[LoopPlan] = []
        live: list[tuple[int, int, int]] = []  # from one equation to another, and bytes
        inner: list[int] = []
        for i, eqn in enumerate(jaxpr.eqns):
            found, peak, slots = self._of_equation(eqn, depth, around)
            loops += found
            inner.append(peak)
            if slots is not None:
                last = _last_use(jaxpr, i, slots)
                live.append((i, last, found[0].plan.peak_bytes))
        at = lambda i: sum(size for first, last, size in live if first <= i <= last)
        return loops, max((at(i) + peak for i, peak in enumerate(inner)), default=0)

    def _of_equation(
        self, eqn: jex.JaxprEqn, depth: int, around: Place | None
    ) -> tuple[list[LoopPlan], int, list[Value] | None]:
        """The loops in an equation, their bytes, and its slots if it is one itself."""
        # Diffrax calls the loops of our adjoint; the user's line is the one that calls
        # Diffrax. JAX keeps only a few frames for each equation, so that line may only
        # be known for the call around it.
        place = place_of(eqn.source_info, through=folders_of("diffrax")) or around
        formula = formula_of(eqn)
        loop, maps = _unwrapped(formula)
        if isinstance(loop, PlannedLoop) and loop.saves is not None:
            if id(loop.saves.layout) not in self.reversed:
                return [], 0, None
            saved = len(loop.out_aval[2].flat)
            is_part = isinstance(formula, Selected)
            shown = formula.shown if is_part else (True,) * saved
            count = sum(shown[len(shown) - saved :])
            slots = list(eqn.outvars)[len(eqn.outvars) - count :]
            placed = () if maps else self._placements(loop.problem.step, eqn)
            plan, batch = self._plan(loop, maps, placed)
            name = loop_name(eqn.source_info.name_stack) or "loop"
            return [LoopPlan(name, place, plan, batch, depth)], 0, slots
        loops: list[LoopPlan] = []
        if formula is not None:
            # This traces the formula, which decides on the layouts of inner loops.
            if _has_loops(formula):
                program = formula.expanded
                self.known.update({id(d.stands_for_it): d for d in self.decided})
                self.reversed.update(_reversed_in(program))
                loops, _ = self.of_program(program, depth + 1, place)
            return loops, 0, None
        peak = 0
        for program in programs_in(eqn):
            variables = getattr(program, "jaxpr", program).invars
            # A call hands on what it is given, and a `jax.shard_map` does not.
            if [var.aval for var in variables] == [var.aval for var in eqn.invars]:
                self.split_as(program, self._shardings(eqn))
            found, size = self.of_program(program, depth, place)
            loops, peak = [*loops, *found], max(peak, size)
        return loops, peak, None

    def _shardings(self, eqn: jex.JaxprEqn) -> list[NamedSharding | None]:
        return [self.placed.get(id(var)) for var in eqn.invars]

    def _placements(self, step: Step, eqn: jex.JaxprEqn) -> Placements:
        """How the inputs of a loop are split, if it is known of any."""
        found = self._shardings(eqn)
        if not any(found) or len(found) != len(step.jaxpr.in_avals):
            return ()
        return tuple(map(tuple, split(found, step.num_consts, step.num_carry)))

    def _plan(
        self, loop: PlannedLoop, maps: Maps, placed: Placements
    ) -> tuple[Plan | WhilePlan, int]:
        """The plan of a loop, and how many examples run in it."""
        problem, saves = loop.problem, loop.saves
        assert saves is not None
        # A layout that is not listed is that of a second derivative, which is planned
        # for all of its inputs.
        of_all = Decided(saves.layout, saves.layout, all_active(problem.step))
        decided = self.known.get(id(saves.layout), of_all)
        active = _fitting(decided.active, problem)
        undifferentiated = _undifferentiated_fitting(decided.undifferentiated, problem)
        problem = dataclasses.replace(
            problem, undifferentiated=undifferentiated, placed=placed
        )
        batch = math.prod((problem.loop.batch, *(axis.size for axis, _ in maps)))
        with unlisted():
            return _plan_of(problem, active, decided.layout, maps), batch


def _unwrapped(formula: Formula) -> tuple[Formula, Maps]:
    """The formula within selections and `vmap`s, and these `vmap`s."""
    maps: Maps = ()
    while isinstance(formula, Selected | Vmapped):
        if isinstance(formula, Vmapped):
            maps = ((formula.axis_data, formula.dims), *maps)
        formula = formula.formula
    return formula, maps


def _plan_of(
    problem: Problem, active: Active, layout: AbstractLayout, maps: Maps
) -> Plan | WhilePlan:
    if isinstance(layout, AbstractWhileLayout):
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
    leaves that are left count as differentiated.
    """
    step = problem.step
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
    """The same for the leaves of the initial carry that are not differentiated."""
    count = problem.step.num_carry
    if not undifferentiated or len(undifferentiated) > count:
        return (True,) * count if undifferentiated else ()
    return (*[False] * (count - len(undifferentiated)), *undifferentiated)


def _last_use(jaxpr: AnyJaxpr, start: int, slots: Sequence[Value]) -> int:
    """The last equation that reads slots; beyond the last one if they are outputs."""
    held = set(map(id, slots))
    if any(id(var) in held for var in jaxpr.outvars):
        return len(jaxpr.eqns)
    uses = (
        i
        for i, eqn in enumerate(jaxpr.eqns)
        if any(id(var) in held for var in eqn.invars)
    )
    return max(uses, default=start)


def _reversed_in(program: AnyJaxpr) -> Iterator[int]:
    """The identities of the layouts by which loops are reversed in a program."""
    for eqn in equations(program):
        if (formula := formula_of(eqn)) is not None:
            inner, _ = _unwrapped(formula)
            if isinstance(inner, Reverse):
                yield id(inner.layout)


def _has_loops(formula: Formula) -> bool:
    """Whether there are loops of this library in the programs of a formula."""
    return any(
        formula_of(eqn) is not None
        for program in formula.jaxprs
        for eqn in equations(program)
    )


def _row(loop: LoopPlan) -> tuple[str, ...]:
    steps, *others = loop.plan.columns
    name, size = "  " * loop.depth + loop.name, format_bytes(loop.plan.peak_bytes)
    return name, steps, str(loop.batch), *others, size
