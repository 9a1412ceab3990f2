"""How much memory a layout takes: its program is compiled, and never run."""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax

from ..._compiled import temporary_bytes
from ..._programs import batched_types, vmap
from ..engine._forward import Active
from ..engine._layout import AbstractLayout, Layout
from ..engine._listing import unlisted
from ..engine._loop import nbytes
from ..engine._problem import Problem
from ._alike import alike
from ._cost import step_cost
from ._guess import working_set
from ._trial import Fixed, gradient_of, of_length

# The axes of `vmap`s, the innermost first, each with where it is in the inputs.
Maps: TypeAlias = tuple[tuple[Any, tuple[int | None, ...]], ...]


def peak_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a gradient allocates, besides its inputs and outputs; or less.

    A loop is compiled alone, and within another program a few more of its values may
    be buffers, so that a little is added.
    """
    problem = problem.under(layout)
    order, extra = layout.order.stand_in(len(problem.step.carry_types))
    stand_in = dataclasses.replace(layout, order=order)
    loop = of_length(problem.loop, order.length)
    small = dataclasses.replace(problem, loop=loop)
    measured = loop_bytes(small, active, stand_in)
    if measured is None:
        cost = step_cost(problem, active)
        measured, extra = layout.stored_bytes(cost) + working_set(cost), 0
    ends = bytes_of_ends(problem) if problem.run.loop.stops else 0
    return with_a_little_more(measured + extra + ends)


def loop_bytes(
    problem: Problem, active: Active, layout: AbstractLayout, maps: Maps = ()
) -> int | None:
    """The bytes that the gradient of this very loop allocates by itself.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        layout: How it is stored and reversed.
        maps: The `vmap`s around the gradient.

    Returns:
        The bytes, or `None` if they cannot be known.
    """
    fixed = dataclasses.replace(alike(problem).run, planner=Fixed(layout))
    platform = jax.default_backend(), bool(jax.config.read("jax_enable_x64"))
    return _temporary(fixed, active, maps, platform)


def bytes_of_ends(problem: Problem) -> int:
    """What a loop that may stop starts from, there and back.

    Within another program these may be copied.
    """
    return 2 * nbytes(problem.step.carry_types)


def with_a_little_more(size: int) -> int:
    """What to expect of a loop within another program."""
    return size + size // 200 + 512


@functools.lru_cache(maxsize=512)
def _temporary(
    problem: Problem, active: Active, maps: Maps, platform: tuple[str, bool]
) -> int | None:
    """The temporary memory of a loop's gradient, if it can be known."""
    run, types = gradient_of(problem, active)
    leaves, tree = jax.tree.flatten(types)
    mapped = lambda *leaves: run(*jax.tree.unflatten(tree, leaves))
    for axis_data, dims in maps:
        mapped = vmap(mapped, axis_data, dims, 0)
        leaves = batched_types(leaves, dims, axis_data.size)
    with unlisted():
        return temporary_bytes(mapped, *leaves)
