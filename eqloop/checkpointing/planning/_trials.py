"""Short loops, each of one kind of piece: what they take, in time and in memory.

Each is compiled once for the device. Where that is here and has room, they are run for
a moment, on numbers that are made up; otherwise their time is told from the compiled
programs (`_roofline.py`). Whole functions are run in the same way.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._arrays import explicit_sharding, nbytes
from ..._device import planning_device, remembered_per_device
from ..._programs import (
    NotCompiledError,
    allocated_bytes,
    by_itself,
    equations,
    formula_of,
    lowered,
    said_to_be_estimated,
)
from ..._types import Aval, PyTree, Value
from ...progress import Again
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._pace import Pace
from ..engine._planned_loop import PlannedLoop, Reverse, planned_loop
from ..engine._problem import Counted, Problem
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.slots._slots import key_impl
from ..steps._step import without_outputs
from ._compile_times import compiles_slowly, note_seconds
from ._facts import key_of, recall, remember
from ._gradient_program import Fixed, flat, gradient_of, input_types, of_length
from ._roofline import roofline
from ._work import rates

# All programs together are run for about this long, in seconds, in turn: each for so
# long at once, and at least and at most so often.
_ENOUGH, _TURN = 0.15, 5e-3
_FEWEST_TURNS, _MOST_TURNS = 3, 30
# A machine has no other work if its processors were busy with these runs for this part
# of their time.
_IDLE = 0.9
# More memory is not taken for runs, which begin when a user's arrays are there.
_MOST_BYTES = 2**27
# A whole function is run because its user is about to run it.
_MOST_BYTES_OF_WHOLE = 2**31


@dataclasses.dataclass(frozen=True)
class StepsAlone:
    """What is tried beside gradients: the steps, and nothing else.

    Attributes:
        length: How many steps are run.
    """

    length: int

    def duration(self, pace: Pace) -> float:
        """How long it takes, in nanoseconds."""
        return self.length * pace.advance


class Trial(NamedTuple):
    """What a short loop was seen to take.

    Attributes:
        nanoseconds: The time of one run.
        scatter: By what part of it two halves of the runs differ.
        nbytes: The bytes that it allocates besides its inputs and outputs.
        was_run: Whether the time was measured.
    """

    nanoseconds: float
    scatter: float
    nbytes: int
    was_run: bool


def trials(
    problem: Problem,
    active: Active,
    loops: Sequence[Layout | StepsAlone],
    measure: bool,
) -> list[Trial] | None:
    """What short loops take; `None` if nothing can be found out.

    `loops` begin with steps alone, by which trials of different moments are compared.
    """
    # Nothing can be found out if what a loop consists of cannot be compiled by itself,
    # as what has a collective cannot, or if the first two took long to compile.
    device = planning_device()
    runs = measure and device.is_here and _can_be_run(problem)
    # By what a step says, not by its identity: another process, or a step that was
    # traced again, finds the same facts.
    about = [problem.step, problem.policy, active, runs, problem.placed]
    keys = [key_of([*about, _short(problem, one).loop, one]) for one in loops]
    known = {key: fact for key in keys if (fact := recall(key)) is not None}
    missing = {
        key: one for key, one in zip(keys, loops, strict=True) if key not in known
    }
    if missing:
        # Each process would measure something else, and make another program.
        if runs and jax.process_count() > 1:
            return None
        first = known.get(keys[0])
        tried = missing if first is None else {keys[0]: loops[0], **missing}
        looks = first is None and measure and jax.process_count() == 1
        found = _tried(problem, active, list(tried.values()), runs, looks)
        if found is None:
            return None
        new = dict(zip(tried, found, strict=True))
        if first is not None:
            # At another moment the machine may have been slower, and so was the step.
            slower = new.pop(keys[0])["nanoseconds"] / first["nanoseconds"]
            for fact in new.values():
                fact["nanoseconds"] /= slower
        remember(new)
        known |= new
    facts = [known[key] for key in keys]
    return [
        Trial(f["nanoseconds"], f["scatter"], round(f["bytes"]), bool(f["run"]))
        for f in facts
    ]


def _tried(
    problem: Problem,
    active: Active,
    loops: Sequence[Layout | StepsAlone],
    runs: bool,
    looks: bool,
) -> list[dict[str, float]] | None:
    # The same program for each length of the loop itself.
    programs = [_ShortLoop(_short(problem, one), active, one) for one in loops]
    try:
        with by_itself(*(one.function for one in programs)):
            compiled = []
            if looks:
                # Steps alone, and a gradient.
                start = time.process_time()
                compiled = _side_by_side(_compiled, map(_lowered, programs[:2]))
                note_seconds(problem.step, time.process_time() - start)
                if compiles_slowly(problem.step, measure=True):
                    return None
            rest = map(_lowered, programs[len(compiled) :])
            compiled += _side_by_side(_compiled, rest)
            sizes = list(map(allocated_bytes, compiled))
            types = [one.function[1] for one in programs]
            runs = runs and _has_room(compiled, types, _MOST_BYTES)
            if runs:
                times = _best_times(programs, compiled)
            else:
                # A loop that computes nothing starts no kernel, and takes no time.
                told = (roofline(one.as_text(), rates()) for one in compiled)
                times = [(max(time, 1.0), 0.0) for time in told]
    except NotCompiledError as error:
        said_to_be_estimated("The time of a plan", error)
        return None
    return [
        {"nanoseconds": time, "scatter": scatter, "bytes": size, "run": runs}
        for (time, scatter), size in zip(times, sizes, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _ShortLoop:
    """The program of a short loop, whose problem has the length that is tried."""

    problem: Problem
    active: Active
    loop: Layout | StepsAlone

    @functools.cached_property
    def function(self) -> tuple[Callable[..., PyTree], list[Aval]]:
        """The function, and the types of its arguments."""
        short, loop = self.problem, self.loop
        if isinstance(loop, Layout):
            fixed = dataclasses.replace(short, planner=Fixed(loop))
            return gradient_of(fixed, self.active)
        # They are the engine's, of a schedule for kernels as well.
        by_engine = Fixed(Layout(AllAtOnce(short.loop.length)))
        step = without_outputs(short.step)
        short = dataclasses.replace(short, step=step, planner=by_engine)
        return flat(functools.partial(planned_loop, short), *input_types(short))


def _short(problem: Problem, one: Layout | StepsAlone) -> Problem:
    """The loop with the length that is tried."""
    length = one.order.length if isinstance(one, Layout) else one.length
    loop = of_length(problem.loop, length)
    loop = dataclasses.replace(loop, meter=Again(backward=True).meter(loop.meter))
    return dataclasses.replace(problem, loop=loop)


# Few: each holds a program, to run it beside others that are compiled later.
@remembered_per_device(maxsize=16)
def _lowered(program: _ShortLoop) -> jax.stages.Lowered:
    run, types = program.function
    return lowered(run, *types)


@functools.lru_cache(maxsize=16)
def _compiled(lowered: jax.stages.Lowered) -> Any:
    return lowered.compile()


def _side_by_side(compile: Callable[..., Any], lowered: Iterable[Any]) -> list[Any]:
    # XLA compiles without holding Python up. What is compiled can be called while a
    # user's program is being traced.
    programs = list(lowered)
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(compile, programs))


def run_times(
    gradients: Sequence[Callable[..., PyTree]], types: Sequence[Aval]
) -> list[tuple[float, float]] | None:
    """The nanoseconds of functions of the same arrays, run in turn for a moment.

    Each comes with by what part of it two halves of the runs differ.
    """
    # They cannot be run in one of several processes, on a device that is not here, or
    # where there is no room: then this is `None`.
    device = planning_device()
    if not device.is_here or jax.process_count() > 1:
        return None
    try:
        with by_itself(*((run, types) for run in gradients)):
            every = (lowered(run, *types) for run in gradients)
            compiled = _side_by_side(jax.stages.Lowered.compile, every)
            of_each = [types] * len(compiled)
            if not _has_room(compiled, of_each, _MOST_BYTES_OF_WHOLE):
                return None
            return _timed(compiled, of_each)
    except NotCompiledError as error:
        said_to_be_estimated("The time of a plan", error)
        return None


def can_be_run(program: jex.ClosedJaxpr) -> bool:
    """Whether a program ends on any numbers, without side effects and on one device."""
    is_split = any(map(explicit_sharding, program.in_avals))
    is_harmless = not program.effects and not is_split
    return is_harmless and all(map(_ends_anyway, equations(program)))


def _has_room(
    compiled: Sequence[Any], types: Sequence[Sequence[Aval]], most: int
) -> bool:
    """Whether the device has room to run these programs in turn, and is one."""
    shardings: list[Any] = jax.tree.leaves([one.input_shardings for one in compiled])
    if any(len(sharding.device_set) > 1 for sharding in shardings):
        return False
    kinds = dict.fromkeys(aval for of_one in types for aval in of_one)
    memory = [one.memory_analysis() for one in compiled]
    own = max(m.temp_size_in_bytes + m.output_size_in_bytes for m in memory)
    stats = planning_device().own.memory_stats() or {}
    free = stats.get("bytes_limit", most) - stats.get("bytes_in_use", 0)
    return nbytes(list(kinds)) + own <= min(free, most)


def _best_times(
    programs: Sequence[_ShortLoop], compiled: Sequence[Any]
) -> list[tuple[float, float]]:
    """The times of short loops, see `_timed`."""
    return _timed(compiled, [one.function[1] for one in programs])


def _timed(
    compiled: Sequence[Any], types: Sequence[Sequence[Aval]]
) -> list[tuple[float, float]]:
    """The time of each, and by what part of it two halves of the runs differ.

    They are run in turn, so that what disturbs the machine disturbs all of them alike.
    """
    # What a callback is given, and the arrays that are made here, would be a part of
    # the program that is being traced.
    on_device = jax.default_device(planning_device().own)
    with jax.ensure_compile_time_eval(), on_device:
        # Arguments that are alike are made once.
        made = functools.cache(_made_up)
        return _in_turn(compiled, [list(map(made, of_one)) for of_one in types])


def _in_turn(
    compiled: Sequence[Any], arguments: Sequence[Sequence[Value]]
) -> list[tuple[float, float]]:
    # The first time, memory is touched that was never used before.
    for run, args in zip(compiled, arguments, strict=True):
        jax.block_until_ready(run(*args))
    turns: list[list[_Turn]] = [[] for _ in compiled]
    start = time.perf_counter()
    for turn in range(1, 1 + _MOST_TURNS):
        for run, args, taken in zip(compiled, arguments, turns, strict=True):
            taken.append(_turn(run, args))
        if turn >= _FEWEST_TURNS and time.perf_counter() - start > _ENOUGH:
            break
    every = [turn for taken in turns for turn in taken]
    # On a GPU the processor waits.
    waits = planning_device().platform != "cpu"
    busy = sum(turn.processor * len(turn.walls) for turn in every)
    is_idle = waits or busy > _IDLE * sum(sum(turn.walls) for turn in every)
    halves = (
        (_time_of(taken[::2], is_idle), _time_of(taken[1::2], is_idle))
        for taken in turns
    )
    return [(1e9 * min(both), max(both) / min(both) - 1) for both in halves]


class _Turn(NamedTuple):
    """Some runs of a program, one after the other: seconds.

    Attributes:
        walls: How long each run took.
        processor: The processor time of one, in the mean: the system counts it late.
    """

    walls: list[float]
    processor: float


def _turn(run: Callable[..., Value], args: Sequence[Value]) -> _Turn:
    walls, start = list[float](), time.process_time()
    while sum(walls) < _TURN:
        before = time.perf_counter()
        jax.block_until_ready(run(*args))
        walls.append(time.perf_counter() - before)
    return _Turn(walls, (time.process_time() - start) / len(walls))


def _time_of(turns: Sequence[_Turn], is_idle: bool) -> float:
    """How long a program takes, in seconds."""
    shortest = min(min(turn.walls) for turn in turns)
    if is_idle:
        return shortest
    # If the machine has other work, a run takes longer, and no more processor time; on
    # several cores, it takes more of that.
    return min(shortest, statistics.fmean(turn.processor for turn in turns))


def _made_up(aval: Aval) -> Value:
    """Small numbers of this type, with which few steps blow up."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        zeros = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        data = jnp.zeros(zeros.shape, zeros.dtype)
        return jax.random.wrap_key_data(data, impl=key_impl(dtype))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jax.device_put(np.zeros(shape, dtype))
    # All different, as zeros or equal numbers might be a special case.
    numbers = (np.arange(math.prod(shape)) % 97).astype(np.float32) * 1e-3 + 0.01
    return jax.device_put(numbers.astype(dtype).reshape(shape))


@functools.lru_cache(maxsize=512)
def _can_be_run(problem: Problem) -> bool:
    # What is split over several devices need not fit on one of them.
    return not problem.placed and can_be_run(problem.step.jaxpr)


def _ends_anyway(eqn: jex.JaxprEqn) -> bool:
    loop = formula_of(eqn)
    is_loop = isinstance(loop, PlannedLoop | Reverse)
    counts = not is_loop or isinstance(loop.problem, Counted)
    # A callback may be pure and still be slow, or ask somebody.
    return counts and eqn.primitive.name not in ("while", "pure_callback")
