"""How long the pieces of a gradient take if the primal stores the products of steps."""

import dataclasses

from ..engine._costs import AbstractPace
from ..engine._forward import Active
from ..engine._layout import Piece
from ..engine._loop import nbytes
from ..engine._problem import Problem
from ..engine._stored_products import StoredProducts, with_stored_products
from ._cost import outputs_wanted, step_cost
from ._measured import pace


def guessed_pace(
    problem: Problem, active: Active, base: AbstractPace
) -> AbstractPace | None:
    """How long the pieces take, as a guess, if the primal can store products.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        base: How long they take if it does not.
    """
    stored = _stored(problem, active)
    if stored is None:
        return None
    cost = step_cost(stored.rerun, stored.active(active))
    return _of_primal(stored, base, base.given_products(cost))


def pace_given_products(
    problem: Problem, active: Active, base: AbstractPace, piece: Piece
) -> AbstractPace:
    """How long they take: measured, if that is worthwhile and `base` was measured.

    It is `base` if the primal cannot store products.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        base: How long the pieces take if it does not.
        piece: What is asked for.
    """
    stored = _stored(problem, active)
    if stored is None:
        return base
    active = stored.active(active)
    found = pace(stored.rerun, active, base.is_measured, pieces=lambda: [piece])
    if found.is_measured != base.is_measured:
        found = base.given_products(found.cost)
    return _of_primal(stored, base, found)


def _stored(problem: Problem, active: Active) -> StoredProducts | None:
    return with_stored_products(problem, active, outputs_wanted(problem))


def _of_primal(
    stored: StoredProducts, base: AbstractPace, given: AbstractPace
) -> AbstractPace:
    """The pace of a loop whose steps are given what the primal has stored."""
    size = nbytes(stored.rerun.step.x_types[-stored.count :])
    cost = dataclasses.replace(given.cost, stored_products=size)
    besides = base.advance - given.advance + 2 * size * base.rate.byte
    return dataclasses.replace(given, cost=cost, of_primal=besides)
