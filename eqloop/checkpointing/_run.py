"""Runs loops: the entrance to this room for the loops of the library.

A loop is brought into its normal form and becomes a primitive. Its schedule makes a
plan only when the primitive is differentiated, or when it is asked what it would plan.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from .._arrays import (
    Arrays,
    axes_of,
    split,
    stack_type,
    strongly_typed,
    vary,
    zero_array,
)
from .._device import remembered_per_device
from .._programs import CannotVaryError, varied
from .._types import Value
from ..progress import Guarded, Meter, counted, with_count
from ._policies import AUTO
from ._schedules import AbstractSchedule, LoopPolicy
from .engine._forward import Active, stored
from .engine._layout import Layout
from .engine._listing import is_listing
from .engine._packing import packing_of
from .engine._planned_loop import planned_loop
from .engine._problem import Counted, Placements, Problem
from .engine._transformed import all_active
from .rewrites._normal_form import normal_form, reading_consts
from .rewrites._views import Viewing
from .steps._buffers import writes_rows
from .steps._loop import Loop
from .steps._step import Step, StepResult, make_step
from .whiles._ending import Ending
from .whiles._lockstep import (
    in_lockstep,
    needs_lockstep,
    started_together,
    without_lockstep,
)
from .whiles._online import Online
from .whiles._stopping import UntilStopped
from .whiles._until_stop import ForwardOnly


def run_loop(
    step: Step,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
    *,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: LoopPolicy = None,
    joints: int = 0,
) -> StepResult:
    """Runs a step in a loop.

    The `joints` of a loop that stops say how often its examples were joined.
    """
    if loop.length == 0:
        return list(init), [zero_array(stack_type(y, 0)) for y in step.y_types]
    step, consts = schedule.prepared(step, consts)
    viewing, left = _viewing(step, loop)
    if viewing.step is not step:
        carry, ys = run_loop(
            viewing.step,
            consts,
            init,
            xs,
            loop=left,
            schedule=schedule,
            policy=policy,
        )
        pairs = zip(xs, loop.x_axes, strict=True)
        rows = [loop.kept_of(strongly_typed(x), axis) for x, axis in pairs]
        return carry, viewing.join(ys, rows, loop.x_axes, [0] * len(step.y_types))
    # Under `StoreAll`, a plain loop is a `lax.scan`: JAX differentiates it without this
    # library. Not if only some rows of `ys` are kept: to do that, a scan would have to
    # cut up its `xs`, and so copy them even if it is not differentiated. And not if it
    # writes rows of buffers, whose cotangents XLA would copy at each step.
    is_plain = loop.kept is None and not (loop.meter.is_shown or loop.stops)
    is_by_jax = schedule._by_jax and is_plain and not writes_rows(step.jaxpr)
    # While plans are listed, such a loop is a primitive as well, or it would have none.
    if is_by_jax and not is_listing():
        # What stays in the carry is a const to JAX as well. But it finds that out after
        # it was told in which type the cotangents of consts are added up.
        step, consts = reading_consts(step, consts, init, loop.sums)
        return stored(step, loop, None if policy == AUTO else policy, consts, init, xs)
    # The place in the carry of the number of steps. A bar has two leaves of its own
    # before it, see `_counting`.
    at = dict(count_at=(3 if loop.meter.is_shown else 1) + joints, joints=joints)
    problem = _problem(step, loop, schedule, policy, **at)
    return _run_planned(problem, consts, init, xs)


def _problem(
    step: Step, loop: Loop, schedule: AbstractSchedule, policy: LoopPolicy, **at: int
) -> Problem:
    """A loop, and how it is to be run; `at` is for one that stops."""
    kind = functools.partial(Ending, **at) if loop.stops else Counted
    chooses, policy = policy == AUTO, None if policy == AUTO else policy
    return kind(step, loop, policy, schedule, chooses_policy=chooses)


def planned(
    step: Step,
    loop: Loop,
    schedule: AbstractSchedule,
    policy: LoopPolicy,
    placed: Placements = (),
) -> tuple[Problem, Active, Layout]:
    """A loop all of whose inputs are differentiated, and its layout.

    A loop that may end early is planned as if it ran all of its steps.
    """
    problem = in_lockstep(_problem(step, loop, schedule, policy))
    if placed:
        consts, init, xs = placed
        added = (None,) * (problem.step.num_carry - len(init))
        problem = dataclasses.replace(problem, placed=(consts, added + init, xs))
    active = all_active(problem.step)
    if (packing := packing_of(problem, active)) is not None:
        problem = packing.of(problem)
        active = all_active(problem.step)
    return problem.as_planned, active, problem.layout(active)


@remembered_per_device(maxsize=512)
def usually_stored(schedule: AbstractSchedule, length: int) -> tuple[int, int]:
    """What a schedule stores of a loop of so many steps, if these are as any others.

    How many carries it stores at once, and the residuals of how many steps.
    """
    number = jax.core.ShapedArray((), jnp.dtype("float32"))
    step = make_step(lambda _, carry, x: ([jnp.sin(carry[0])], x), [], [number], [])
    order = planned(step, Loop(length), schedule, None)[2].order
    return order.slots, order.block


@dataclasses.dataclass(frozen=True)
class AsScan:
    """A while loop that runs as a scan which may end early.

    Attributes:
        max_steps: The most steps that it runs.
        schedule: The schedule of the scan.
    """

    max_steps: int
    schedule: AbstractSchedule


def run_while(
    step: Step,
    consts: Arrays,
    init: Arrays,
    starts: tuple[int | None, ...],
    planner: ForwardOnly | Online | AsScan,
    meter: Meter,
    joints: int = 0,
) -> list[Value]:
    """Runs a step for as long as the first leaf of the carry says so.

    The `joints` are leaves before it, if it runs `AsScan`: one for each join.
    """
    if not planner.max_steps:
        return list(init)
    loop = Loop(planner.max_steps, meter=meter, starts=starts)
    if not isinstance(planner, AsScan):
        problem = UntilStopped(step, loop, None, planner)
        return _run_planned(problem, consts, init, [])[0]
    # An `Ending` has the number of its steps in the carry.
    at = joints + 1

    def counted(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        before, (count,), after = split(carry, at, 1)
        # The first leaf is no input of a step; of joined examples, each has its own.
        count = count + (before[joints].astype(count.dtype) if joints else 1)
        made, _ = step(consts, [*before, *after], x)
        return [*made[:at], count, *made[at:]], []

    padded = loop.padded_starts(len(init))
    starts = (*padded[:at], None, *padded[at:])
    loop = dataclasses.replace(loop, stops=True, starts=starts)
    init = [*init[:at], jnp.zeros_like(init[joints], jnp.int32), *init[at:]]
    types = step.const_types, list(map(jax.typeof, init)), []
    inputs = make_step(counted, *types), consts, init, []
    settings = dict[str, Any](loop=loop, schedule=planner.schedule, joints=joints)
    carry, _ = run_loop(*inputs, **settings)
    return [*carry[:at], *carry[at + 1 :]]


def form_to_plan(
    step: Step, loop: Loop, placed: Placements
) -> tuple[Step, Loop, Placements]:
    """What `run_loop` plans of a loop that has no bar; see `Problem.placed`."""
    viewing, left = _viewing(step, loop)
    form = normal_form(viewing.step)
    if placed:
        consts, init, xs = placed
        consts, init = form.arranged(consts, init, [None] * sum(form.refs))
        placed = tuple(consts), tuple(init), xs
    return form.step, form.loop(left), placed


def _viewing(step: Step, loop: Loop) -> tuple[Viewing, Loop]:
    """The step without outputs that are views of `xs`, and the loop around that.

    A bar may show any output. And a loop that stops returns zeros for the steps that it
    did not run.
    """
    if loop.meter.is_shown or loop.stops:
        return Viewing(step, (None,) * len(step.y_types)), loop
    viewing = Viewing.of(step)
    # Without outputs there are no rows to keep some of.
    kept = loop.kept if viewing.step.y_types else None
    if viewing.step is not step:
        loop = loop.noting(viewing.note)
    return viewing, dataclasses.replace(loop, kept=kept)


def _run_planned(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> StepResult:
    """Runs a loop as a primitive, in its normal form."""
    has_bars = problem.loop.meter.is_shown
    # A loop that stops has no position that is known from outside, so a bar counts the
    # steps by itself.
    counts = has_bars and problem.lead > 0
    if counts:
        problem, init = _counting(problem, init)
    if has_bars:
        problem = problem.with_bars(Guarded())
    # As in `jax.lax.while_loop`, examples that can see each other have all of the carry
    # to themselves. A key that all of them share gives other numbers.
    keeps_carry = has_bars or needs_lockstep(problem)
    if keeps_carry:
        step, consts = reading_consts(problem.step, consts, init, problem.loop.sums)
        problem = dataclasses.replace(problem, step=step)
    form = normal_form(problem.step, keeps_carry=keeps_carry)
    loop = form.loop(problem.loop)
    problem = dataclasses.replace(problem, step=form.step, loop=loop)
    given, start = form.open(consts, init)
    xs, joint = list(map(strongly_typed, xs)), in_lockstep(problem)
    is_joint = joint is not problem
    start = started_together(start) if is_joint else start
    if joint.lead > 0:
        joint, given, start, xs = _apart_on_devices(joint, given, start, xs)
    carry, ys = planned_loop(joint, given, start, xs)
    carry = without_lockstep(carry) if is_joint else carry
    carry = form.close(consts, init, carry)
    return [carry[0], *carry[3:]] if counts else carry, ys


def _apart_on_devices(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[Problem, list[Value], list[Value], list[Value]]:
    """A loop that stops, none of whose steps has to wait for other devices.

    If devices stop at different times, whatever a step reads may differ between them:
    what it closes over, too, is cast before the loop, and the transpose of that adds up
    its cotangents once, after the way back.
    """
    inputs, axes = (list(consts), list(init), list(xs)), axes_of(init[0])
    if all(axes <= axes_of(x) for group in inputs for x in group):
        return problem, *inputs
    step, of_all = problem.step, lambda program: varied(program, axes)
    try:
        step = step.rewritten(of_all)
    except CannotVaryError:
        # Nothing is wrong, unless the loop is differentiated in reverse mode: then it
        # is refused (`AbstractStopping.check`).
        return problem, *inputs
    step = dataclasses.replace(step, inverse=step.inverse and of_all(step.inverse))
    cast = lambda group: [vary(x, axes) for x in group]
    consts, init, xs = map(cast, inputs)
    return dataclasses.replace(problem, step=step), consts, init, xs


def _counting(problem: Problem, init: Arrays) -> tuple[Problem, list[Value]]:
    """A loop that counts its steps for a bar.

    Two leaves follow the first leaf of its carry: the number of the bar, and the count.
    """
    step, loop, init = problem.step, problem.loop, with_count(init)
    types = step.const_types, list(map(jax.typeof, init)), step.x_types
    step = make_step(counted(loop.meter, step), *types)
    loop = dataclasses.replace(loop, starts=())
    return dataclasses.replace(problem, step=step, loop=loop), init
