"""How long the pieces of a gradient take, for everything that a step may keep."""

import dataclasses
import functools

from ..._device import remembered_per_device
from ..engine._forward import Active
from ..engine._layout import Layout, Piece
from ..engine._pace import AbstractPace
from ..engine._problem import Problem
from ..engine.reversals._together import can_join
from ._cost import step_cost
from ._kept_values import Kept, costs_by_kept
from ._measured_pace import pace, with_side_by_side
from ._pace_of_known import with_guess, with_pace_of_known
from ._search import layouts

# What is stored can be counted, but for what XLA keeps in the place of something else.
_SURELY_TOO_MUCH = 2


@dataclasses.dataclass(frozen=True)
class Paces:
    """How long the pieces of a gradient take.

    Attributes:
        entries: What a step keeps, and how long the pieces take then. The first is for
            a step whose policy is not chosen.
    """

    entries: tuple[tuple[Kept, AbstractPace], ...]

    @functools.cached_property
    def _by_kept(self) -> dict[Kept, AbstractPace]:
        return dict(self.entries)

    def of(self, layout: Layout) -> AbstractPace:
        """Those for what a layout has a step keep."""
        return self._by_kept[layout.kept]

    def duration(self, layout: Layout) -> float:
        """How long a gradient takes, in nanoseconds."""
        return layout.duration(self.of(layout))

    @property
    def base(self) -> AbstractPace:
        """Those where nothing is chosen."""
        return self.entries[0][1]

    @property
    def sets(self) -> list[tuple[str, ...]]:
        """What a step may keep, if there is a choice; the first of them is nothing."""
        return [kept for kept in self._by_kept if kept is not None]

    def replaced(self, kept: Kept, own: AbstractPace) -> "Paces":
        """The same where for one of the choices more is known, or without a choice."""
        entries = {**self._by_kept, kept: own}
        return Paces(tuple(entries.items()))


def paces(
    problem: Problem,
    active: Active,
    measure: bool,
    nbytes: int | None = None,
) -> Paces:
    """How long the pieces of a gradient take.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        measure: Whether to find out by running them.
        nbytes: How many bytes a gradient may take, if layouts that take more are not
            asked for.
    """
    pieces = None
    if measure and nbytes is not None:
        pieces = functools.partial(_pieces_within, problem, active, nbytes)
    base = pace(problem, active, measure, pieces=pieces)
    base = with_guess(problem, active, base)
    entries: list[tuple[Kept, AbstractPace]] = [(None, base)]
    # The derivative of a loop for which it was chosen has the policy already, and
    # `jax.checkpoint` takes no step with effects.
    is_free = problem.chooses_policy and problem.policy is None
    if is_free and not problem.step.jaxpr.effects:
        (nothing, _, again), *others = costs_by_kept(problem, active)
        # Not from one that keeps everything: what it takes to store all residuals of a
        # step says little of what it takes to store a few.
        bare = pace_keeping(problem, active, nothing, base)
        entries.append((nothing, bare))
        for kept, cost, work in others:
            entries.append((kept, bare.recomputing(cost, work - again)))
    return Paces(tuple(entries))


@remembered_per_device(maxsize=128)
def _pieces_within(problem: Problem, active: Active, nbytes: int) -> frozenset[Piece]:
    """The pieces of layouts that may fit into so many bytes."""
    cost, length = step_cost(problem, active), problem.loop.length
    every = layouts(length, can_join(problem.step), cost.rows)
    room = _SURELY_TOO_MUCH * nbytes
    return frozenset(one.piece for one in every if one.stored_bytes(cost) <= room)


def pace_for(
    problem: Problem, active: Active, layout: Layout, base: AbstractPace
) -> AbstractPace:
    """A pace that knows all that the time of one layout depends on.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        layout: The layout.
        base: How long the pieces of any layout take. If that was measured, so is what
            this layout needs in addition.
    """
    if layout.order.asks_for_products(layout.reversal):
        base = with_pace_of_known(problem, active, base, layout.piece)
    return (
        with_side_by_side(problem, active, base)
        if layout.order.side_by_side > 1
        else base
    )


def pace_keeping(
    problem: Problem, active: Active, kept: tuple[str, ...], base: AbstractPace
) -> AbstractPace:
    """How long the pieces of a gradient take if each step keeps some of its values.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        kept: What a step keeps.
        base: How long they take where nothing is chosen. If that was measured, so is
            this.
    """
    return pace(problem, active, base.is_measured, kept).beside(base)
