"""How long the pieces of a gradient take if the products of steps are known.

Steps that are given what the primal has stored are as fast as steps of a loop that gets
its products as `xs`. So that is the loop that is estimated, and measured.
"""

import dataclasses

from ..engine._forward import Active
from ..engine._layout import Piece
from ..engine._pace import AbstractPace
from ..engine._problem import Problem
from ..engine._stored_rows import products_to_store
from ._cost import outputs_wanted, step_cost
from ._measured_pace import pace


def with_guess(problem: Problem, active: Active, base: AbstractPace) -> AbstractPace:
    """A pace that also knows how long it takes with known products, as a guess.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        base: How long the pieces take without.
    """
    found = _products_as_xs(problem, active)
    if found is None:
        return base
    return dataclasses.replace(
        base, of_known=base.with_known_products(step_cost(*found))
    )


def with_pace_of_known(
    problem: Problem, active: Active, base: AbstractPace, piece: Piece
) -> AbstractPace:
    """The same, measured if `base` was, and if it is worthwhile.

    Args:
        problem: The loop.
        active: Which inputs are differentiated.
        base: How long the pieces take without.
        piece: What is asked for.
    """
    found = _products_as_xs(problem, active)
    if found is None:
        return base
    known = pace(*found, base.is_measured, pieces=lambda: [piece])
    if known.is_measured != base.is_measured:
        known = base.with_known_products(known.cost)
    return dataclasses.replace(base, of_known=known)


def _products_as_xs(problem: Problem, active: Active) -> tuple[Problem, Active] | None:
    """The loop that gets its products as `xs`, if it can be, and what is active."""
    products = products_to_store(problem, active, outputs_wanted(problem))
    if products is None:
        return None
    count, loop = len(products.types), problem.loop
    loop = dataclasses.replace(loop, x_axes=(*loop.x_axes, *[0] * count))
    given = dataclasses.replace(problem, step=products.step, loop=loop)
    return given, active._replace(xs=(*active.xs, *[False] * count))
