"""How long the pieces of a gradient take, for everything that a step may keep.

What decides between two plans are things that no count of operations tells: how XLA
fuses a step, and what of it stays in the cache. So short loops are tried, each of which
consists of one kind of piece, and what was estimated is corrected by what was seen.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from ..._arrays import nbytes
from ..engine._costs import StepCost
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._pace import ADVANCE, RESIDUALS, Pace, Piece
from ..engine._problem import Problem
from ..engine._transformed import gradient_back
from ..engine.orders._all_at_once import AllAtOnce
from ..engine.orders._levels import Nest
from ..engine.orders._nested import Nested
from ..engine.reversals._known_products import products_of
from ..engine.reversals._together import Together, can_join
from ..engine.slots._slots import AbstractSlots
from ._compile_times import compiles_slowly, largeness
from ._cost import computes_again, outputs_wanted, step_cost
from ._kept_values import Kept, costs_by_kept
from ._trials import StepsAlone, Trial, trials
from ._work import rates

# How long one run of a short loop should take, in nanoseconds, so that calling it does
# not count; how many steps it has at least, so that it has whole blocks; and how many
# bytes its steps may take.
_RUN_TIME = 2e6
_FEWEST_STEPS = 128
# How many steps batches have that are tried: about the root of the steps, as in most
# plans with little memory.
_SMALLEST, _LARGEST = 8, 128
_MOST_BYTES = 2**26
# Loops whose gradient takes less than this are not worth it, or a multiple of it if the
# step is large: to try pieces is mostly to compile them.
_WORTH_TRYING = 1e6
# The part of its time that the piece of a short loop takes, at the least.
_LEAST = 0.1


class Seen(NamedTuple):
    """The memory of a short loop, from which that of others of its kind is told.

    Attributes:
        layout: How it is run.
        measured: The bytes that it takes.
        counted: The bytes of what it stores, which is not all that it takes.
    """

    layout: Layout
    measured: int
    counted: int


@dataclasses.dataclass(frozen=True)
class SecondPlace:
    """Where carries may be stored other than on the device.

    Attributes:
        slots: The slots there.
        nbytes: How many bytes they may take.
    """

    slots: AbstractSlots
    nbytes: int


class Far(NamedTuple):
    """A second place for the carries of a loop.

    Attributes:
        slots: The slots there.
        most: How many carries it has room for.
        move: The time of writing a carry to there, or of reading it.
    """

    slots: AbstractSlots
    most: int
    move: float


@dataclasses.dataclass(frozen=True)
class Paces:
    """How long the pieces of a gradient take.

    What is seen of a piece of a step holds whatever the step keeps of its values.

    Attributes:
        base: For a step of which nothing is chosen that it keeps.
        kept: What a step may keep, if that is chosen, and its cost then. The first is
            one that keeps nothing.
        sizes: What short loops took in memory.
        measure: Whether pieces are run, if that can be.
        are_tried: Whether it is worthwhile to try pieces. Otherwise all is estimated.
        compiles_slowly: Whether a program with the step takes long to compile. Then no
            piece is tried, and only layouts are considered whose programs have the step
            few times. `None` if that is seen when the first one is compiled.
        far: Where carries may be other than on the device, if there is such a place.
    """

    base: Pace
    kept: tuple[tuple[tuple[str, ...], StepCost], ...] = ()
    sizes: tuple[Seen, ...] = ()
    measure: bool = True
    are_tried: bool = False
    compiles_slowly: bool | None = False
    far: Far | None = None

    @functools.cached_property
    def _by_kept(self) -> dict[Kept, Pace]:
        chosen = {kept: dataclasses.replace(self.base, cost=c) for kept, c in self.kept}
        return {None: self.base, **chosen}

    def of(self, layout: Layout) -> Pace:
        """Those for what a layout has a step keep."""
        return self._by_kept[layout.kept]

    def duration(self, layout: Layout) -> float:
        """How long a gradient takes, in nanoseconds, its carries moved."""
        moving = 0.0
        if self.far is not None and layout.is_elsewhere:
            moving = self.far.move * layout.order.moves
        return layout.duration(self.of(layout)) + moving

    def stored_bytes(self, layout: Layout) -> int:
        """The bytes of what a layout stores on the device."""
        return layout.stored_bytes(self.of(layout).cost)

    def evaluations(self, layout: Layout) -> int:
        """How often steps are evaluated, with those that compute values again."""
        is_again = computes_again(self.of(layout).cost, self.base.cost)
        return layout.evaluations + layout.steps_read_from_residuals * is_again

    def unknown(self, layout: Layout) -> frozenset[Piece]:
        """The pieces of a layout that are to be tried, and were not yet."""
        seen = dict(self.base.seen)
        return layout.pieces - seen.keys() if self.are_tried else frozenset()

    def compiling(self, slowly: bool | None) -> "Paces":
        """These paces, if a program takes long to compile (`slowly`), or does not."""
        tried = self.are_tried and not slowly
        return dataclasses.replace(self, are_tried=tried, compiles_slowly=slowly)

    def offers(self, layout: Layout) -> bool:
        """Whether its program is short enough, and its far carries are not too many."""
        most = self.far and layout.is_elsewhere and self.far.most
        if most and layout.order.primal_slots > most:
            return False
        # Each nest has the step, there and back, and a batch has it twice on its way
        # back: such a program takes up to several times as long to compile.
        is_short = len(layout.order.levels) <= 1 and layout.reversal.stores_residuals
        return is_short or not self.compiles_slowly

    @functools.cached_property
    def rounded(self) -> "Paces":
        """These paces as they come out however noisy the machine is."""
        # Which layouts of the same pieces are fastest depends little on what the pieces
        # take. It is decided by factors of two beside a step that is run.
        step, seen = self.base.factor(ADVANCE), self.base.seen
        near = tuple((p, _power(step) * _power(f / step)) for p, f in seen)
        return dataclasses.replace(self, base=dataclasses.replace(self.base, seen=near))

    def keeping(self, problem: Problem, active: Active, kept: Kept) -> "Paces":
        """These paces, if a step may also keep just these values."""
        if kept is None or kept in self._by_kept:
            return self
        cost = step_cost(problem.keeping(kept), active)
        return dataclasses.replace(self, kept=(*self.kept, (kept, cost)))


def paces(problem: Problem, active: Active, measure: bool) -> Paces:
    """How long the pieces of a gradient take, as far as it can be estimated.

    `measure` says whether pieces are run when they are tried, see `tried`.
    """
    known = _cost_with_products(problem, active)
    base = Pace(step_cost(problem, active), rates(), known)
    # The derivative of a loop for which it was chosen has the policy already, and
    # `jax.checkpoint` takes no step with effects.
    is_free = problem.chooses_policy and problem.policy is None
    is_free = is_free and not problem.step.jaxpr.effects
    kept = costs_by_kept(problem, active) if is_free else ()
    worthwhile = not _is_quick(problem, base)
    times = Paces(base, kept, measure=measure, are_tried=worthwhile)
    return times.compiling(compiles_slowly(problem.step, measure))


def tried(
    problem: Problem, active: Active, times: Paces, layouts: Iterable[Layout]
) -> Paces:
    """The paces after all was tried that the times of some layouts depend on."""
    # In the order of the layouts: what is tried first tells how long programs compile.
    unknown = dict.fromkeys(
        piece for one in layouts for piece in sorted(times.unknown(one), key=str)
    )
    if not unknown:
        return times
    length = _trial_length(problem, active, times.base)
    root = 2 ** round(math.log2(problem.loop.length) / 2)
    size = min(max(root, _SMALLEST), _LARGEST, length)
    # To steps alone all others are compared, and so they come first.
    pieces = [ADVANCE, *(piece for piece in unknown if piece != ADVANCE)]
    loops = [_trial_of(piece, length, size) for piece in pieces]
    found = trials(problem, active, loops, times.measure)
    if found is None:
        slowly = compiles_slowly(problem.step, times.measure)
        return dataclasses.replace(times, are_tried=False, compiles_slowly=slowly)
    for piece, loop, trial in zip(pieces, loops, found, strict=True):
        if piece in unknown:
            times = _corrected(times, loop, piece, trial)
        if isinstance(loop, Layout) and not problem.as_run.loop.stops:
            cost = times.base.cost
            part = cost.everything * loop.order.length // problem.loop.length
            stored = loop.stored_bytes(dataclasses.replace(cost, everything=part))
            seen = Seen(loop, trial.nbytes, stored)
            times = dataclasses.replace(times, sizes=(*times.sizes, seen))
    return times


def _corrected(
    times: Paces, loop: Layout | StepsAlone, piece: Piece, trial: Trial
) -> Paces:
    """Has a piece take so long that a short loop takes the time that it was seen to."""
    pace = times.base
    # The time is linear in the factor.
    without, once = (loop.duration(pace.with_seen(piece, f)) for f in (0.0, 1.0))
    # Of two noisy times the difference may be too small, or below zero.
    own = max(trial.nanoseconds - without, _LEAST * trial.nanoseconds)
    pace = dataclasses.replace(
        pace.with_seen(piece, own / (once - without)),
        is_measured=pace.is_measured or trial.was_run,
        scatter=max(pace.scatter, trial.scatter),
    )
    return dataclasses.replace(times, base=pace)


def _trial_of(piece: Piece, length: int, size: int) -> Layout | StepsAlone:
    """A short loop that consists of one piece, in batches of this size."""
    if piece == ADVANCE:
        return StepsAlone(length)
    if piece == RESIDUALS:
        return Layout(AllAtOnce(length))
    # Of tiny steps, to store carries takes longer than to take single ones back.
    return Layout(Nested((Nest((length // size,), size),)), reversal=Together(size))


def with_second_place(
    problem: Problem, active: Active, times: Paces, second: SecondPlace | None
) -> Paces:
    """The paces of a loop that may also store carries in a second place."""
    if second is None:
        return times
    slots, pace = second.slots, times.base
    held = nbytes(slots.packed_types(pace.cost.held_types))
    # One more row is for carries that are not kept.
    if not held or (most := second.nbytes // held - 1) < 1:
        return times
    move = slots.move_time(held, pace.rate)
    # If the times of the pieces were measured, so is this: by a short loop all of whose
    # carries are stored there, and one with near slots.
    if pace.is_measured:
        length = _trial_length(problem, active, pace)
        order = Nested((Nest((length,)),))
        loops = [StepsAlone(length), Layout(order, slots.near), Layout(order, slots)]
        if (found := trials(problem, active, loops, times.measure)) is not None:
            _, near, far = (trial.nanoseconds / length for trial in found)
            again = 0.0 if slots.outlast_primal else pace.advance
            # Each carry is written once and read once, and so it is near.
            move = max(far - again - near, 0.0) / 2 + pace.slot / 2
    return dataclasses.replace(times, far=Far(slots, most, move))


def _is_quick(problem: Problem, pace: Pace) -> bool:
    """Whether a gradient takes little time beside what it takes to compile it."""
    takes = problem.loop.length * pace.everything
    return takes < _WORTH_TRYING * max(largeness(problem.step), 1) ** 2


def _trial_length(problem: Problem, active: Active, pace: Pace) -> int:
    """How many steps short loops have: a power of two, as most blocks are.

    Two at least: a block of a single step is none, and tells nothing of blocks.
    """
    cost = pace.cost
    per_step = cost.x + cost.ct_x + cost.ct_y + cost.residuals + cost.carry
    fits = _MOST_BYTES // max(per_step, 1)
    long = round(_RUN_TIME / _if_fused(problem, active, pace))
    # Steps that take very long are run a few times, and no more.
    short = min(_FEWEST_STEPS, max(round(10 * long), 2))
    length = min(max(long, short, 2), max(fits, 2), problem.loop.length)
    return 2 ** (length.bit_length() - 1)


def _if_fused(problem: Problem, active: Active, pace: Pace) -> float:
    """How long it takes per step to store everything if XLA fuses all of a step.

    A small step then takes next to nothing to start.
    """
    fused = dataclasses.replace(pace.rate, equation=pace.rate.equation / 20)
    return Pace(step_cost(problem, active, fused), fused).everything


def _cost_with_products(problem: Problem, active: Active) -> StepCost | None:
    """What a step costs whose products are known, if it has some."""
    # Steps that are given what was stored are as fast as steps of a loop that gets its
    # products as `xs`. So it is that loop of which the cost is estimated.
    # If a loop may stop early, not all of its batches are whole.
    step = problem.step
    if problem.as_run.loop.stops or step.inverse is not None or not can_join(step):
        return None
    products = products_of(gradient_back(problem, active, outputs_wanted(problem)))
    if products is None:
        return None
    count, loop = len(products.types), problem.loop
    loop = dataclasses.replace(loop, x_axes=(*loop.x_axes, *[0] * count))
    placed = problem.placed
    if placed:
        *others, xs = placed
        placed = (*others, (*xs, *[None] * count))
    given = dataclasses.replace(
        problem, step=products.back.step, loop=loop, placed=placed
    )
    return step_cost(given, active._replace(xs=(*active.xs, *[False] * count)))


def _power(factor: float) -> float:
    """The nearest power of two."""
    return 2.0 ** round(math.log2(factor))
