"""How much memory a layout takes: its program is compiled, and never run."""

import dataclasses
import functools
import time
from typing import Any, TypeAlias

import jax

from ..._arrays import is_inexact, nbytes, pick
from ..._compiled import largest_array
from ..._device import planning_device, remembered_per_device
from ..._programs import (
    Registers,
    allocated_bytes,
    batched_types,
    registers_of,
    told_of,
    vmap,
)
from ..engine._forward import Active
from ..engine._layout import AbstractLayout, Layout
from ..engine._listing import unlisted
from ..engine._problem import Problem
from ._alike import alike
from ._compile_times import is_noted, note_seconds
from ._cost import as_stored, list_bytes, step_cost
from ._facts import Fact, key_of, recall, remember
from ._gradient_program import Fixed, gradient_of, of_length, types_on_device
from ._memory_guess import working_set

# The axes of `vmap`s, the innermost first, each with where it is in the inputs.
Maps: TypeAlias = tuple[tuple[Any, tuple[int | None, ...]], ...]


# What XLA was seen to allocate for a loop within another program, besides what it takes
# alone, are small buffers: up to 448 bytes of them for loops with ten leaves that store
# carries, whatever these take, and 0.3 % where all residuals of one are stored.
_SMALL_BUFFERS = 512
_BUFFER_OF_A_LEAF = 64
# Nobody waits for more of compilation, in seconds, to be told more of an error.
_LONG = 10.0


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, rather too many than too few.

    Inputs and outputs do not count.
    """
    # A loop is compiled alone. Within another program a few more of its values may be
    # buffers, so a little is added.
    step, problem = problem.step, problem.under(layout)
    order, extra = layout.order, 0
    # The compiler of a TPU copies `xs` in whole, for some loops in loops and not for
    # others, so that only the loop itself tells.
    # And a list of rows has one for each step.
    has_lists = list_bytes(problem, active, layout) > 0
    # A kernel has a scratch for each of its levels, and is compiled as it is.
    is_kernel = layout.runner is not None
    if planning_device().platform != "tpu" and not has_lists and not is_kernel:
        order, extra = layout.order.stand_in(len(problem.step.carry_types))
    small = dataclasses.replace(problem, loop=of_length(problem.loop, order.length))
    found = _compiled(small, active, dataclasses.replace(layout, order=order))
    if found is not None:
        if not is_noted(step):
            note_seconds(step, found.get("seconds", 0.0))
        measured = round(found["bytes"])
    else:
        cost = step_cost(as_stored(problem, active, layout), active)
        measured = layout.stored_bytes(cost) + working_set(cost)
        extra = list_bytes(problem, active, layout)
    size = measured + extra + bytes_of_guards(problem.as_run)
    carry = [nbytes([x]) for x in pick(types_on_device(problem)[1], active.carry)]
    if layout.stores_residuals:
        # Which ones are stored depends on the program around the loop. Cotangents that
        # are constants may be there from the start, and one of two residuals twice.
        more = size // 200 + 2 * sum(carry)
    else:
        # The way back of a loss that reads no `ys` was seen to take a leaf more.
        more = max(carry, default=0) if any(map(is_inexact, step.y_types)) else 0
    leaves = len(problem.step.jaxpr.in_avals)
    return size + more + _SMALL_BUFFERS + _BUFFER_OF_A_LEAF * leaves


def device_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """`peak_bytes` of the device alone: on a CPU without the slots on its host."""
    size = peak_bytes(problem, active, layout)
    if not (layout.is_elsewhere and layout.slots.take_device_memory):
        return size
    cost = step_cost(as_stored(problem, active, layout), active)
    return size - layout.bytes_elsewhere(layout.stored_cost(cost))


def loop_bytes(
    problem: Problem,
    active: Active,
    layout: AbstractLayout,
    maps: Maps = (),
) -> int | None:
    """The bytes that the gradient of this very loop allocates by itself, within `maps`.

    It is `None` if they cannot be known.
    """
    found = _compiled(problem, active, layout, maps)
    return None if found is None else round(found["bytes"])


def registers_of_kernel(
    problem: Problem, active: Active, layout: Layout
) -> Registers | None:
    """What a thread takes of a loop that is one kernel each way, if that is known."""
    found = layout.runner and _compiled(problem.under(layout), active, layout)
    if not found or "registers" not in found:
        return None
    return Registers(round(found["registers"]), round(found["stack"]))


def _compiled(
    problem: Problem,
    active: Active,
    layout: AbstractLayout,
    maps: Maps = (),
) -> Fact | None:
    """The bytes of a gradient, and the seconds that it took to compile its program."""
    known = alike(problem).as_run
    about = [known.step, type(known), known.loop]
    about += [known.policy, known.undifferentiated, known.placed]
    about += [active, layout, maps]
    key = key_of(about)
    if (fact := recall(key)) is not None:
        return fact
    fixed = dataclasses.replace(known, planner=Fixed(layout))
    fact = _temporary(fixed, active, maps)
    if fact is not None:
        remember({key: fact})
    return fact


def largest_in_gradient(problem: Problem, active: Active, layout: Layout) -> str:
    """A sentence on the largest array in a loop's gradient, unless that takes long."""
    known = _compiled(problem, active, layout)
    if known is None or known["seconds"] > _LONG:
        return ""
    fixed = dataclasses.replace(problem.as_run, planner=Fixed(layout))
    run, types = gradient_of(fixed, active)
    with unlisted():
        return largest_array(lambda leaves: run(*leaves), types)


def bytes_of_guards(problem: Problem) -> int:
    """What a batch of loops that stop makes of its first carry, see `whiles/_batch.py`.

    To the loop that is compiled alone they are inputs.
    """
    if not problem.lead or problem.loop.batch == 1:
        return 0
    _, carry, x = types_on_device(problem)
    return nbytes([*carry, *x])


def with_a_little_more(size: int) -> int:
    """What to expect of a loop within another program."""
    return size + size // 200 + _SMALL_BUFFERS


@remembered_per_device(maxsize=512)
def _temporary(problem: Problem, active: Active, maps: Maps) -> Fact | None:
    """The temporary memory of a loop's gradient, if it can be known."""
    start = time.process_time()
    run, types = gradient_of(problem, active)
    for axis_data, dims in maps:
        run = vmap(run, axis_data, dims, 0)
        types = batched_types(types, dims, axis_data)
    with unlisted():
        fact = told_of(functools.partial(_told, problem), run, *types)
    seconds = time.process_time() - start
    return None if fact is None else {**fact, "seconds": seconds}


def _told(problem: Problem, compiled: jax.stages.Compiled) -> Fact:
    fact = {"bytes": allocated_bytes(compiled)}
    runner = problem.planner.runner
    if runner and (registers := registers_of(compiled, runner.kernel)):
        fact |= {"registers": registers.number, "stack": registers.stack}
    return fact
