"""What one step of a loop costs, in bytes and in work: by abstract evaluation."""

import dataclasses
import functools
import math

from ..._arrays import Flags, is_inexact, nbytes, pick, sum_type, union
from ..._programs import equations
from ..engine._backward_step import BackwardStep
from ..engine._costs import Rates, StepCost
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._leaves import StoredLeaves, leaves_read
from ..engine._problem import Problem
from ..engine._step_parts import StepParts, parts_of
from ..engine._transformed import (
    again,
    gradient_back,
    needs_of_gradient,
    settled_problem,
)
from ..engine.reversals._known_products import products_of
from ..engine.reversals._products_in_parts import product_bytes
from ..engine.reversals._together import can_join, parts_in_turn
from ..steps._loop import Loop
from ..steps._step import Step
from ._alike import alike
from ._gradient_program import types_on_device
from ._work import count_dots, rates, start, work


def step_cost(problem: Problem, active: Active, rate: Rates | None = None) -> StepCost:
    """What one step costs, given which inputs are differentiated.

    `rate` is the time of single operations; by default, that on the device in use.
    """
    return _cost_of(alike(problem), active, rate or rates())


@functools.lru_cache(maxsize=128)
def _cost_of(problem: Problem, active: Active, rate: Rates) -> StepCost:
    step, wanted = problem.step, outputs_wanted(problem)
    back = gradient_back(problem, active, wanted)
    products = products_of(back) if can_join(step) else None
    pull = parts_of(back).rest.jaxpr
    needs = needs_of_gradient(problem, active, wanted)
    forward = again(settled_problem(problem, active, reverse=True))
    known = StoredLeaves.of(needs, forward, problem.loop_back)
    read = union(leaves_read(back, problem.loop), known.firsts)
    read = [r and h for r, h in zip(read, needs.held, strict=True)]
    consts, carry, x = types_on_device(problem)
    # The others are split like these, as far as one knows without compiling.
    whole = nbytes([*step.carry_types, *step.x_types])
    part = nbytes([*carry, *x]) / max(whole, 1)
    own = lambda size: math.ceil(part * size)
    saved = [h and s for h, s in zip(needs.held, step.saves, strict=True)]
    held_types = tuple(
        aval for aval, h, s in zip(carry, needs.held, saved, strict=True) if h and not s
    )
    saved_types = tuple(pick(carry, saved))
    sizes = dict(
        x=nbytes(x),
        ct_x=nbytes(pick(x, active.xs)),
        ct_y=own(nbytes(pick(step.y_types, wanted))),
    )
    residuals = quiet = own(_residuals(back, problem.loop))
    if problem.loop.kept is not None:
        silent = gradient_back(problem, active, (False,) * len(wanted))
        quiet = own(_residuals(silent, problem.loop))
    once, dots = _started_once(step, back, rate)
    return StepCost(
        carry=nbytes(carry),
        read=nbytes(pick(carry, read)),
        held=nbytes(held_types),
        held_types=held_types,
        saved=nbytes(saved_types),
        saved_types=saved_types,
        ct_consts=nbytes(
            sum_type(aval, problem.loop.sums) for aval in pick(consts, active.consts)
        ),
        products=own(product_bytes(pull, sum(active.consts))),
        known=own(nbytes(products.types)) if products else 0,
        maps=own(_map_bytes(back, _residuals(back, problem.loop))),
        residuals=residuals,
        everything=_everything(problem.loop, residuals, quiet, **sizes),
        evaluation=work(step.jaxpr.jaxpr, rate),
        reversal=work(pull, rate),
        started_once=once,
        dots_once=dots,
        **sizes,
    )


def list_bytes(problem: Problem, active: Active, layout: Layout | None = None) -> int:
    """Bytes of the lists of rows that are stored in place of buffers in slots.

    `layout` may be `None`, if it is not decided yet.
    """
    if layout is not None and layout.stores_residuals:
        return 0
    problem = alike(problem)
    needs = needs_of_gradient(problem, active, outputs_wanted(problem), layout)
    forward = again(settled_problem(problem, active, reverse=True))
    known = StoredLeaves.of(needs, forward, problem.loop_back)
    return sum(rows.nbytes for _, rows in known.lists)


def as_stored(problem: Problem, active: Active, layout: Layout) -> Problem:
    """The loop, with slots that hold what those of a layout do."""
    # Nearly all loops have no lists, and share the costs of their steps.
    differs = list_bytes(problem, active, layout) != list_bytes(problem, active)
    return dataclasses.replace(problem, carries=layout.carries) if differs else problem


def computed_again(problem: Problem, active: Active, layout: Layout) -> int:
    """How many steps the policy of a loop has evaluated once more for one gradient."""
    # Where residuals are stored, the reversal of a step computes again what the policy
    # does not keep. A step that is reversed as soon as it has been run computes its
    # values once: with a policy only its effects, such as callbacks, happen once more.
    if problem.policy is None:
        return 0
    stored = layout.steps_read_from_residuals
    again = layout.order.length - stored if problem.step.jaxpr.effects else 0
    if stored:
        least = step_cost(dataclasses.replace(problem, policy=None), active)
        again += stored * computes_again(step_cost(problem, active), least)
    return again


def computes_again(cost: StepCost, least: StepCost) -> bool:
    """Whether a step computes values again that another one keeps."""
    own, other = cost.reversal, least.reversal
    return own > other and not math.isclose(own, other)


def _started_once(step: Step, back: BackwardStep, rate: Rates) -> tuple[float, int]:
    """The time to start what a batch of steps has once, and the number of its dots."""
    if not can_join(step):
        return 0.0, 0
    _, linear, _ = parts_in_turn(back)
    programs = step.jaxpr, parts_of(back).rest
    time = sum(start(one.jaxpr, rate) for one in programs) - start(linear.jaxpr, rate)
    dots = sum(map(count_dots, programs)) - count_dots(linear)
    return max(time, 0.0), max(dots, 0)


def gradient_parts(problem: Problem, active: Active) -> StepParts:
    """The reversal of a step, taken apart, if all outputs have a cotangent."""
    return parts_of(gradient_back(problem, active, outputs_wanted(problem)))


def outputs_wanted(problem: Problem) -> Flags:
    """The leaves of `y` that have a cotangent, if all do that can."""
    has_rows = problem.loop.rows > 0
    return tuple(has_rows and is_inexact(y) for y in problem.step.y_types)


def _residuals(back: BackwardStep, loop: Loop) -> int:
    """Bytes that one step adds to the residuals of a block."""
    consts, carry, x, *_ = back.one.types
    parts, first = parts_of(back), len(consts) + len(carry)
    # Rows of `xs` are read where they are, unless they have to be moved for that.
    moved = [
        aval
        for i, (aval, axis) in enumerate(zip(x, loop.x_axes, strict=True))
        if axis and first + i in parts.source
    ]
    return nbytes(parts.kept_types) + nbytes(moved)


def _map_bytes(back: BackwardStep, residuals: int) -> int:
    """Bytes of what is known of a step before the cotangent of its carry is."""
    step = back.step
    if not can_join(step):
        return 0
    known, _, varies = parts_in_turn(back)
    counted = nbytes(pick(known.out_avals, varies))
    # A loop in a step has more in memory while it is linearised: about as much again.
    loops = any(eqn.primitive.name == "scan" for eqn in equations(step.jaxpr))
    return max(counted, 2 * residuals) if loops else counted


def _everything(
    loop: Loop, residuals: int, quiet: int, *, x: int, ct_x: int, ct_y: int
) -> int:
    """Bytes of the residuals of a loop, `quiet` ones where outputs are not kept."""
    total = loop.rows * residuals + (loop.length - loop.rows) * quiet
    if loop.kept is None:
        return total
    before, between, after = loop.gaps
    # A kept step and those up to the next are a loop of their own, which holds its
    # residuals separately until they are added to the others.
    total += residuals + between * (quiet + x + ct_x)
    if loop.rows and (before or after != between):
        total += loop.length * x  # `xs` are cut into parts
    copies = (after < between) + (loop.kept.step < 0)
    return total + 2 * copies * loop.rows * ct_y
