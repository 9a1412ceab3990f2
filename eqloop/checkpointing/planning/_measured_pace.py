"""How long the pieces of a gradient take, from running this very step for a moment.

What decides between two plans are things that no count of operations tells: how XLA
fuses a step, and what of it stays in the cache. So short loops are run, each of which
consists of one kind of piece, and what was estimated is corrected by what was seen.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.extend.core as jex

from ..._arrays import explicit_sharding, nbytes, stack_type
from ..._programs import equations, formula_of
from ..._types import Aval
from ...progress import Again
from ..engine._costs import StepCost, residuals_time
from ..engine._forward import Active
from ..engine._layout import Layout, Piece
from ..engine._pace import AbstractPace, Estimated
from ..engine._primitive import PlannedLoop, Reverse, planned_loop
from ..engine._problem import Counted, Problem
from ..engine._step import Step, without_outputs
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.orders._levels import Nest
from ..engine.orders._nested import Nested
from ..engine.reversals._block_reversals import AbstractReversal, ByResiduals
from ..engine.reversals._together import Together, can_join
from ..engine.slots._slots import AbstractSlots
from ._alike import printed
from ._cost import step_cost
from ._gradient_program import Fixed, gradient_of, input_types, of_length
from ._known_times import key_of, lookup, remember
from ._stopwatch import nanoseconds
from ._work import rates

# A function, not the pieces: to find them takes a while, and often nobody asks.
PiecesAsked: TypeAlias = Callable[[], Collection[Piece]]

# How long one run of a short loop should take, in nanoseconds, so that calling it does
# not count; and how many steps it has at least, so that it has whole blocks.
_RUN_TIME = 4e6
_FEWEST_STEPS = 128
_MOST_BYTES = 2**26
# Loops whose gradient takes less than this are not worth it. To measure is mostly to
# compile, and of a step with more equations than this, that takes long: for 50 leaves a
# hundred times what it takes to trace it, or on JAX 0.12 nearly a thousand times. In
# the number of equations it grows by about the square.
_WORTH_MEASURING = 2e6
_QUICKLY_COMPILED = 64
# The blocks that are tried. What others take is told from these. Of a large step only
# the small ones are: each is another program, and takes as long to compile as the
# gradient itself.
_BLOCKS = (1, 8, 64)
_BATCHES = (8, 64)
_SIDE_BY_SIDE = (8, 32)
_SMALL = 8


@dataclasses.dataclass(frozen=True)
class StepsAlone:
    """What is measured beside gradients: the steps, and nothing else.

    Attributes:
        side_by_side: In how many segments of equal length they are run, side by side.
    """

    side_by_side: int = 1


@dataclasses.dataclass(frozen=True)
class Measured(AbstractPace):
    """What pieces were seen to take.

    Attributes:
        run: What a step took that was run.
        stored: What a step took of a loop whose residuals were all stored.
        blocks: Of some blocks, how many times as long as estimated they took: the kind
            of reversal, how many steps it takes at once, and that factor.
        side_by_side: How many times as long a step took that was run in several
            segments side by side: how many these were, and that factor.
    """

    run: float
    stored: float
    blocks: tuple[tuple[Hashable, int, float], ...]
    side_by_side: tuple[tuple[int, float], ...] = ()

    @property
    def is_measured(self) -> bool:
        return True

    @property
    def advance(self) -> float:
        return self.run

    def advance_side_by_side(self, count: int) -> float:
        seen = [(1, 1.0), *self.side_by_side]
        if len(seen) == 1:  # and so only an estimate tells what is spared
            estimated = Estimated(self.cost, self.rate)
            return self.run * estimated.advance_side_by_side(count) / estimated.advance
        return self.run * _between(seen, count)

    @property
    def everything(self) -> float:
        return self.stored

    def block(self, reversal: AbstractReversal, count: int) -> float:
        estimate = Estimated(self.cost, self.rate)
        estimated = estimate.block(reversal, count)
        batch, kind = reversal.batch(count), reversal.kind
        # A block of one step has no loop of its own, and tells nothing of larger ones.
        seen = [
            (size, factor)
            for name, size, factor in self.blocks
            if name == kind and (size == 1) == (batch == 1)
        ]
        # Of a short loop no larger block is measured. It stores residuals as well, and
        # the estimate is as far off as for a loop that stores all of them.
        seen = seen or [(batch, self.stored / estimate.everything)]
        return estimated * _between(seen, batch)

    def recomputing(self, cost: StepCost, again: float) -> Self:
        # To compute again takes as much longer than estimated as computing did.
        longer = self.run / Estimated(self.cost, self.rate).advance
        stores = residuals_time(cost, self.rate) - residuals_time(self.cost, self.rate)
        stored = max(self.stored + longer * again + stores, self.run)
        return dataclasses.replace(self, cost=cost, stored=stored)

    def with_known_products(self, cost: StepCost) -> Self:
        # The rest of a step takes as much longer than estimated as all of it does.
        longer = self.run / Estimated(self.cost, self.rate).advance
        run = longer * Estimated(cost, self.rate).advance
        return dataclasses.replace(self, cost=cost, run=run)

    def with_side_by_side(self, factors: Sequence[tuple[int, float]]) -> Self:
        return dataclasses.replace(self, side_by_side=tuple(factors))

    def beside(self, other: AbstractPace) -> Self:
        one = ByResiduals()
        slower = other.block(one, 1) / self.block(one, 1)
        return dataclasses.replace(
            self,
            run=other.advance,
            stored=slower * self.stored,
            blocks=tuple((kind, size, slower * f) for kind, size, f in self.blocks),
        )


def pace(
    problem: Problem,
    active: Active,
    measure: bool,
    kept: tuple[str, ...] | None = None,
    pieces: PiecesAsked | None = None,
) -> AbstractPace:
    """How long the pieces of a loop's gradient take.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        measure: Whether to find out by running them. What cannot be run, and what
            takes less time than measuring it, is estimated in any case.
        kept: What a step keeps where its residuals are stored, if that is chosen.
        pieces: Gives the blocks of which it will be asked, if these are not all. No
            others are run.
    """
    keeping = problem if kept is None else problem.keeping(kept)
    estimated = Estimated(step_cost(keeping, active), rates())
    if not measure or is_quick(problem, estimated) or not _can_be_run(problem):
        return estimated
    return _timed(problem, active, estimated, kept, pieces) or estimated


def with_side_by_side(
    problem: Problem, active: Active, pace: AbstractPace
) -> AbstractPace:
    """A pace that also knows how long steps take in segments that run side by side.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        pace: How long the pieces take. If that was measured, so is this.
    """
    if not pace.is_measured:
        return pace
    length = _trial_length(problem, Estimated(pace.cost, pace.rate))
    most = _SMALL if largeness(problem.step) > 1 else length // 2
    sizes = [size for size in _SIDE_BY_SIDE if size <= most]
    times = times_of(problem, active, [StepsAlone(), *map(StepsAlone, sizes)], length)
    if times is None:
        return pace
    alone, *found = times
    factors = zip(sizes, (time / alone for time in found), strict=True)
    return pace.with_side_by_side(list(factors))


def move_time(
    problem: Problem, active: Active, slots: AbstractSlots, pace: AbstractPace
) -> float:
    """How long it takes to write a carry to slots, or to read it from there.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        slots: The slots.
        pace: How long other pieces take. If that was measured, so is this: by a short
            loop all of whose carries are stored there, and one with near slots.

    Returns:
        Nanoseconds.
    """
    held = nbytes(slots.packed_types(pace.cost.held_types))
    estimated = slots.move_time(held, pace.rate)
    if not pace.is_measured:
        return estimated
    length = _trial_length(problem, Estimated(pace.cost, pace.rate))
    order = Nested((Nest((length,)),))
    layouts = [Layout(order, slots.near), Layout(order, slots)]
    times = times_of(problem, active, layouts, length)
    if times is None:
        return estimated
    near, far = (time / length for time in times)
    again = 0.0 if slots.outlast_primal else pace.advance
    # Each carry is written once and read once, and so it is near.
    return max(far - again - near, 0.0) / 2 + slots.near.move_time(held, pace.rate)


def is_quick(problem: Problem, pace: AbstractPace) -> bool:
    """Whether a gradient takes little time beside what it takes to compile it.

    Args:
        problem: The loop.
        pace: How long the pieces of its gradient take.
    """
    takes = problem.loop.length * pace.everything
    return takes < _WORTH_MEASURING * max(largeness(problem.step), 1) ** 2


@functools.lru_cache(maxsize=512)
def largeness(step: Step) -> float:
    """How many times as large a step is as one that is quickly compiled."""
    return sum(1 for _ in equations(step.jaxpr)) / _QUICKLY_COMPILED


@functools.lru_cache(maxsize=512)
def _can_be_run(problem: Problem) -> bool:
    """Whether the step ends on any numbers, has no side effects, and is on one device.

    What is split over several devices need not fit on one of them.
    """
    jaxpr = problem.step.jaxpr
    is_split = bool(problem.placed) or any(map(explicit_sharding, jaxpr.in_avals))
    is_harmless = not jaxpr.effects and not is_split
    return is_harmless and all(map(_ends_anyway, equations(jaxpr)))


def _ends_anyway(eqn: jex.JaxprEqn) -> bool:
    loop = formula_of(eqn)
    is_loop = isinstance(loop, PlannedLoop | Reverse)
    counts = not is_loop or isinstance(loop.problem, Counted)
    # A callback may be pure and still be slow, or ask somebody.
    return counts and eqn.primitive.name not in ("while", "pure_callback")


def _timed(
    problem: Problem,
    active: Active,
    estimated: Estimated,
    kept: tuple[str, ...] | None,
    pieces: PiecesAsked | None,
) -> Measured | None:
    # 1. Short loops, each of one kind of piece: nothing but steps, all residuals at
    # once, and blocks of one size.
    length = _trial_length(problem, estimated)
    everything = Layout(AllAtOnce(length), kept=kept)
    layouts: list[Layout | StepsAlone] = [StepsAlone(), everything]
    samples = _tried(problem, length, kept is not None)
    if pieces is not None:
        samples = _asked_for(samples, pieces())
    for reversal, count in samples:
        order = Nested((Nest((length // count,), count),))
        names = kept if count > 1 else None
        layouts.append(Layout(order, reversal=reversal, kept=names))
    # 2. All of them are timed in turn, so that what slows the machine slows all alike.
    times = times_of(problem, active, layouts, length, kept)
    if times is None:
        return None
    # 3. From times to factors. A factor corrects an estimate, and so it also serves
    # blocks of other sizes, for which a time would say nothing.
    advance, everything, *others = (time / length for time in times)
    found = Measured(estimated.cost, estimated.rate, advance, everything, ())
    factors = []
    for (reversal, count), time in zip(samples, others, strict=True):
        # The primal has run each step, and every block had a slot.
        block = count * (time - advance) - found.slot
        # Of two noisy times, the difference may be too small, or below zero.
        block = max(block, 0.1 * count * time)
        factor = block / estimated.block(reversal, count)
        factors.append((reversal.kind, reversal.batch(count), factor))
    return dataclasses.replace(found, blocks=tuple(factors))


def _tried(
    problem: Problem, length: int, only_blocks: bool
) -> list[tuple[AbstractReversal, int]]:
    most = min(length, _SMALL) if largeness(problem.step) > 1 else length
    blocks: list[tuple[AbstractReversal, int]] = [
        (ByResiduals(), count) for count in _BLOCKS if count <= most
    ]
    if only_blocks:
        return blocks
    batches = [size for size in _BATCHES if size <= most]
    joined = [(Together(size), 1) for size in batches if can_join(problem.step)]
    return [*blocks, *joined]


def _asked_for(
    samples: list[tuple[AbstractReversal, int]], pieces: Collection[Piece]
) -> list[tuple[AbstractReversal, int]]:
    # A piece lies between two sizes that could be tried, and its time is interpolated
    # from these two. The others are not run.
    sizes = [(one.kind, one.batch(count)) for one, count in samples]
    # Single steps are always run: by them, paces are compared that were measured at
    # different times (`beside`).
    found = {(kind, size) for kind, size in sizes if size == 1}
    for kind, asked in pieces:
        alike = [size for name, size in sizes if name == kind and size > 1]
        below = [size for size in alike if size <= asked]
        above = [size for size in alike if size >= asked > 1]
        found |= {(kind, size) for size in (*below[-1:], *above[:1])}
    return [one for one, piece in zip(samples, sizes, strict=True) if piece in found]


def _trial_length(problem: Problem, estimated: Estimated) -> int:
    """How many steps short loops have: a multiple of all blocks, or a power of two."""
    cost = estimated.cost
    per_step = cost.x + cost.ct_x + cost.ct_y + cost.residuals + cost.carry
    fits = _MOST_BYTES // max(per_step, 1)
    long = round(_RUN_TIME / estimated.everything)
    # Steps that take very long are run a few times, and no more.
    short = min(_FEWEST_STEPS, max(round(10 * long), 2))
    length = max(min(max(long, short), fits, problem.loop.length), 1)
    # Blocks are powers of two. With this length, no loop has steps left over, which
    # would be another piece.
    most = _BLOCKS[-1]
    return length // most * most if length >= most else 2 ** (length.bit_length() - 1)


def times_of(
    problem: Problem,
    active: Active,
    layouts: Sequence[Layout | StepsAlone],
    length: int,
    kept: tuple[str, ...] | None = None,
) -> list[float] | None:
    """How long loops of some length take, by layout, or the steps alone.

    What does not depend on what is kept is measured again for each, to compare what was
    measured at other times.
    """
    short = _of_length(problem, length)
    keys = _keys(short, active, layouts, kept)
    missing = [
        (key, layout)
        for key, layout in zip(keys, layouts, strict=True)
        if lookup(key) is None
    ]
    # Each process would measure something else, and make another program.
    if missing and jax.process_count() > 1:
        return None
    if missing:
        (alone,) = _keys(short, active, [StepsAlone()], kept)
        known = lookup(alone)
        again = [StepsAlone()] * (known is not None)
        tried = [*(layout for _, layout in missing), *again]
        found = nanoseconds([_short_program(short, active, one) for one in tried])
        if found is None:
            return None
        # At another moment the machine may have been slower, and so was the step alone.
        slower = 1.0 if known is None else found.pop() / known
        of_keys = zip((key for key, _ in missing), found, strict=True)
        remember({key: time / slower for key, time in of_keys})
    return [time for key in keys if (time := lookup(key)) is not None]


def _of_length(problem: Problem, length: int) -> Problem:
    loop = of_length(problem.loop, length)
    loop = dataclasses.replace(loop, meter=Again(backward=True).meter(loop.meter))
    return dataclasses.replace(problem, loop=loop)


def _keys(
    problem: Problem,
    active: Active,
    layouts: Sequence[Layout | StepsAlone],
    kept: tuple[str, ...] | None,
) -> list[str]:
    """The names under which the times of a loop are remembered."""
    # By what a step prints, not by its identity: another process, or a step that was
    # traced again, finds the same times.
    about = [*printed(problem.step, active), problem.loop, problem.policy, active, kept]
    return [key_of([*about, layout]) for layout in layouts]


def _short_program(
    problem: Problem, active: Active, layout: Layout | StepsAlone
) -> Any:
    if isinstance(layout, Layout):
        return gradient_of(dataclasses.replace(problem, planner=Fixed(layout)), active)
    problem = dataclasses.replace(problem, step=without_outputs(problem.step))
    if layout.side_by_side == 1:
        return functools.partial(planned_loop, problem), input_types(problem)
    problem = _of_length(problem, problem.loop.length // layout.side_by_side)
    # Segments side by side are a batch of shorter loops, which share the consts.
    run = jax.vmap(functools.partial(planned_loop, problem), in_axes=(None, 0, 0))
    consts, *of_each = input_types(problem)
    return run, [consts, *(_stacked(types, layout.side_by_side) for types in of_each)]


def _stacked(types: Sequence[Aval], count: int) -> list[Aval]:
    return [stack_type(aval, count) for aval in types]


def _between(seen: Sequence[tuple[int, float]], size: int) -> float:
    # Logarithmic in the size and in the factor: the sizes are powers, and a factor of 2
    # is as far from 1 as one of 1/2. Beyond the sizes seen, the nearest one holds.
    seen = sorted(seen)
    size = min(max(size, seen[0][0]), seen[-1][0])
    for (low, at_low), (high, at_high) in itertools.pairwise(seen):
        if low <= size <= high:
            far = math.log(size / low) / math.log(high / low)
            return at_low ** (1 - far) * at_high**far
    return seen[0][1]
