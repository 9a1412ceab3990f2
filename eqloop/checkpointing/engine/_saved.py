"""What a loop leaves for its way back, and the sweep that leaves it."""

from ..._partition import Arrays, Flags, pick
from ..._typecheck import PyTree
from ..._types import Value
from ._forward import Active
from ._held import Needs, Saves
from ._listing import listed
from ._problem import Problem, needs_of_gradient


def saves_of_gradient(
    problem: Problem, active: Active, y_active: Flags, asked_for: Saves | None
) -> Saves:
    """What the forward sweep of a gradient leaves for the way back.

    If the loop is asked to leave slots for another way back as well, then these are in
    the same layout, and hold what either of the two reads.
    """
    layout = asked_for.layout if asked_for else problem.layout(active)
    layout = listed(layout, active, problem.still)
    if layout.stores_residuals:
        return Saves(layout, Needs((), ()))
    wanted = tuple(a and problem.loop.rows > 0 for a in y_active)
    problem = problem.under(layout)
    needs = needs_of_gradient(problem, active, wanted, layout.block)
    if asked_for is not None:
        needs = needs.with_those_of(asked_for.needs)
    return Saves(layout, needs)


def run_and_save(
    problem: Problem, saves: Saves | None, inputs: PyTree
) -> tuple[list[Value], list[Value], list[Value]]:
    """Runs a loop: the last carry, `ys`, and what is saved."""
    carry, ys, saved = problem.repetition.run(problem, saves, inputs)
    return carry, ys, [*saved, *last_saved(problem, saves, carry)]


def last_saved(problem: Problem, saves: Saves | None, carry: Arrays) -> list[Value]:
    """The leaves of the last carry that are saved."""
    if saves is None:
        return []
    return pick(carry[problem.repetition.lead :], saves.needs.final)
