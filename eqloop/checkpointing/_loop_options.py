"""The ways to run one loop of a function, among which a `Fit` chooses.

A loop that is left open is one that was given no schedule.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax.extend.core as jex

from .._arrays import is_inexact
from .._programs import (
    Selected,
    axes_named,
    formula_of,
    map_equations,
    with_formula,
)
from .._types import PyTree, Value
from ._schedules import Fitted, Pinned
from .engine._forward import Active
from .engine._layout import Layout
from .engine._pace import Pace
from .engine._packing import packing_of
from .engine._planned_loop import PlannedLoop, planned_loop
from .engine._problem import Counted, Problem
from .engine._transformed import activity
from .engine.orders import _binomial
from .engine.orders._all_at_once import AllAtOnce
from .engine.reversals._block_reversals import ByResiduals
from .engine.slots._host_slots import HostSlots
from .fused._choice import kernels
from .planning._alike import alike
from .planning._choice import simple_pareto
from .planning._cost import step_cost
from .planning._memory_guess import working_set
from .planning._paces import SecondPlace, paces
from .planning._search import sizes
from .planning._work import rates
from .steps._step import Step
from .whiles._online import Online
from .whiles._stopping import UntilStopped

# Neighbouring numbers of checkpoints of a while loop differ by so much.
_RATIO = 1.2

# Of the ways to run the loops within a step, that with the least memory is tried, and
# the one with the least that takes no more than this times as long as the fastest; but
# only if they take this part of the memory of storing everything.
_LONGER, _SMALLER = 1.5, 0.5


@dataclasses.dataclass(frozen=True)
class WithInner:
    """The schedule of a loop, and those of the loops in its step."""

    outer: Pinned
    inner: "tuple[LoopSchedule, ...]"


# How a loop of known length runs, or one that stops by itself.
LoopSchedule: TypeAlias = Pinned | Online | WithInner


@dataclasses.dataclass(frozen=True)
class LoopOption:
    """One of the ways to run a loop.

    Attributes:
        schedule: The schedule that runs it so.
        stores: What that stores, in a few words.
        stored: The bytes that it stores from its forward pass to its way back.
        peak: The bytes that its gradient takes at once, these among them.
        whole: The same, if everything were stored.
        nanoseconds: How long the gradient takes.
        forward: How long the loop itself takes.
        estimated: How long the gradient was estimated to take before it was seen.
        runs_again: Whether its gradient runs almost every step more than once.
        on_host: The bytes that it stores in the memory of the host.
    """

    schedule: LoopSchedule
    stores: str
    stored: int
    peak: int
    whole: int
    nanoseconds: float
    forward: float
    estimated: float
    runs_again: bool
    on_host: int = 0


def is_left_open(formula: object) -> bool:
    """Whether a primitive is a loop that is left open."""
    if isinstance(formula, Selected):  # a batch of while loops, or its tangents
        return is_left_open(formula.formula)
    if not isinstance(formula, PlannedLoop) or formula.saves is not None:
        return False
    planner = formula.problem.planner
    if isinstance(planner, Online):
        return planner.is_open
    return isinstance(planner, Fitted) and bool(formula.problem.loop.length)


def options_of(
    formula: object,
    perturbed: PyTree,
    host: int = 0,
    as_kernel: bool = False,
    inside: bool = True,
) -> list[LoopOption] | None:
    """The ways to run a loop that is left open, the smallest first.

    `None` if the loop has no derivative. Up to `host` bytes may go to the host.
    """
    if isinstance(formula, Selected):
        if (source := formula.source) is None or not formula.may_pull(perturbed):
            return options_of(formula.formula, perturbed)
        # Tangents are transposed: the loop that they are of goes back, all at once.
        loop, takes = source.formula, source.doubled.takes
        found = options_of(loop, loop.in_tree.unflatten(takes))
        return found and [dataclasses.replace(option, stored=0) for option in found]
    assert isinstance(formula, PlannedLoop)
    problem = formula.problem
    active, y_active = activity(problem.step, perturbed)
    if (packing := packing_of(problem, active)) is not None:
        problem, perturbed = packing.of(problem), packing.marks(perturbed)
        active, y_active = activity(problem.step, perturbed)
    if not any((*active.carry, *y_active)):
        return None
    if isinstance(problem, UntilStopped):
        return list(_of_while(problem, active))
    planned = problem.as_planned
    found = _of_scan(planned, active, host)
    if as_kernel:
        found += _as_kernel(planned, active)
    for inner in _inner_schedules(planned) if inside else ():
        found += [
            dataclasses.replace(
                option,
                schedule=WithInner(option.schedule, inner),
                stores=f"{option.stores}, with loops in its step",
            )
            for option in _of_scan(_with_inner(planned, inner), active, host)
            if isinstance(option.schedule, Pinned)
        ]
    return sorted(found, key=lambda option: option.peak)


def with_schedule(eqn: jex.JaxprEqn, schedule: LoopSchedule) -> jex.JaxprEqn:
    """The equation of a loop that was left open, with a schedule."""
    inner = schedule.inner if isinstance(schedule, WithInner) else ()
    own = schedule.outer if isinstance(schedule, WithInner) else schedule

    def planned(formula: Any) -> Any:
        if isinstance(formula, Selected):
            return formula.with_formulas(planned)
        problem = dataclasses.replace(_with_inner(formula.problem, inner), planner=own)
        return formula.with_params(problem=problem)

    return with_formula(eqn, planned(eqn.params["_prim"]))


def _inner_schedules(problem: Problem) -> list[tuple[LoopSchedule, ...]]:
    """Ways to run all open loops in a step, but for storing everything."""
    each = list[list[LoopOption]]()

    def note(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        formula: Any = formula_of(eqn)
        nonzeros = formula.in_tree.unflatten(map(is_inexact, formula.in_avals_flat))
        is_named = bool(axes_named(formula.effects))
        found = None if is_named else options_of(formula, nonzeros, inside=False)
        each.append(found or [])
        return eqn

    _at_inner(problem, note)
    if not each or not all(each):
        return []
    quick = [_smallest_in_time(options) for options in each]
    ways = [[options[0] for options in each], quick]
    peaks = [sum(option.peak for option in way) for way in ways]
    whole = sum(max(option.peak for option in options) for options in each)
    schedules = [tuple(option.schedule for option in way) for way in ways]
    pairs = zip(schedules, peaks, strict=True)
    return [*dict.fromkeys(way for way, peak in pairs if peak <= _SMALLER * whole)]


def _smallest_in_time(options: Sequence[LoopOption]) -> LoopOption:
    longest = _LONGER * min(option.nanoseconds for option in options)
    return next(option for option in options if option.nanoseconds <= longest)


def _with_inner(problem: Any, schedules: Sequence[LoopSchedule]) -> Any:
    """A loop with schedules for the open loops in its step."""
    left = iter(schedules)
    taken = lambda eqn: with_schedule(eqn, next(left))
    return _at_inner(problem, taken) if schedules else problem


def _at_inner(problem: Any, change: Callable[[jex.JaxprEqn], jex.JaxprEqn]) -> Any:
    at = lambda eqn: change(eqn) if is_left_open(formula_of(eqn)) else eqn
    program = map_equations(problem.step.jaxpr, at)
    step = dataclasses.replace(problem.step, jaxpr=program)
    return dataclasses.replace(problem, step=step)


@dataclasses.dataclass(frozen=True)
class OpenStep:
    """The step of a loop of known length.

    Attributes:
        eqn: The equation of the loop.
        num_carry: How many leaves the carry has.
        x_axes: The axis of `xs` that is looped over, for each leaf.
    """

    eqn: jex.JaxprEqn
    program: jex.ClosedJaxpr
    num_carry: int
    x_axes: tuple[int, ...]

    @classmethod
    def of(cls, eqn: jex.JaxprEqn) -> "OpenStep | None":
        """That of an equation, if it is such a loop."""
        formula = formula_of(eqn)
        problem = formula.problem if isinstance(formula, PlannedLoop) else None
        if not isinstance(problem, Counted):
            return None
        if (step := problem.step).inverse is not None:
            return None  # with another program for a step it would have none
        return cls(eqn, step.jaxpr, step.num_carry, problem.loop.x_axes)

    def run(
        self, program: jex.ClosedJaxpr, first: Value, values: Sequence[Value]
    ) -> list[Value]:
        """The results of the loop with another program, which has one more input."""
        formula: Any = self.eqn.params["_prim"]
        consts, init, xs = formula.in_tree.unflatten(values)
        step = Step(program, 1 + formula.problem.step.num_consts, self.num_carry)
        problem = dataclasses.replace(formula.problem, step=step)
        carry, ys = planned_loop(problem, [first, *consts], init, xs)
        return [*carry, *ys]


def _of_scan(problem: Problem, active: Active, host: int) -> list[LoopOption]:
    known = problem if problem.chooses_policy else alike(problem)
    before = paces(known, active, measure=True)
    slots = HostSlots()
    is_apart = host > 0 and not slots.take_device_memory
    second = SecondPlace(slots, host) if is_apart else None
    found, guess, times = simple_pareto(known, active, before, second)
    forward = times.base.advance * problem.loop.length
    before = dataclasses.replace(before, far=times.far)
    return [
        LoopOption(
            schedule=Pinned(layout),
            stores=_in_words(Pinned(layout)),
            stored=times.stored_bytes(layout),
            peak=guess(layout),
            whole=guess(Layout(AllAtOnce(problem.loop.length))),
            nanoseconds=times.duration(layout),
            forward=forward,
            estimated=before.duration(layout),
            runs_again=layout.evaluations >= 2 * layout.order.length - 1,
            on_host=layout.bytes_elsewhere(times.of(layout).cost),
        )
        for layout in found
    ]


def _as_kernel(problem: Problem, active: Active) -> Iterator[LoopOption]:
    """A loop as one kernel each way, with more and more carries."""
    cost = step_cost(problem, active)
    for kernel, size in kernels(problem, active, measure=True):
        schedule = Pinned(kernel.layout)
        yield LoopOption(
            schedule=schedule,
            stores=f"one kernel, {_in_words(schedule)}",
            stored=kernel.layout.stored_bytes(cost),
            peak=size,
            whole=size,
            nanoseconds=kernel.duration,
            forward=kernel.duration / 2,
            estimated=kernel.duration,
            runs_again=False,
        )


def _in_words(schedule: Pinned) -> str:
    layout = schedule.only
    if layout.stores_residuals:
        return "residuals"
    blocks = f", blocks of {layout.order.block}" if layout.order.block > 1 else ""
    place = f" {layout.slots.place}" if layout.is_elsewhere else ""
    return f"{layout.order.slots} carries{blocks}{place}"


def _of_while(problem: UntilStopped, active: Active) -> Iterator[LoopOption]:
    """A while loop with more and more checkpoints.

    How many steps it will run is not known. It is taken to run as many as it may, or,
    if there is no bound, as many as it runs by default with three evaluations each.
    """
    planner: Any = problem.planner
    of_carry = active.carry[problem.lead :]
    cost = step_cost(problem.counted, active._replace(carry=of_carry))
    pace = Pace(cost, rates())
    steps = planner.length or planner.spreading.most_thrice
    forward = steps * pace.advance
    back = forward + steps * (pace.block(ByResiduals(), 1) + pace.slot)
    for count in sizes(steps, _RATIO):
        again = _binomial.sweep_advances(steps, count)
        time = back + again * pace.advance
        layout = dataclasses.replace(planner, checkpoints=count, is_open=False)
        stored = layout.carries * cost.held
        yield LoopOption(
            schedule=layout,
            stores=f"{count} carries",
            stored=stored,
            peak=stored + working_set(cost),
            whole=steps * cost.held + working_set(cost),
            nanoseconds=time,
            forward=forward,
            estimated=time,
            runs_again=True,
        )
