"""Reverses steps together, unasked, where that is faster and takes little memory.

It gains: without, a plain recurrent cell under `Recursive(16)` takes 1.9 to 2.9 times
as long on a CPU.
"""

import dataclasses
from collections.abc import Iterator

from ..._arrays import is_symbolic, nbytes, pick
from ..engine._layout import Layout
from ..engine._loop_spec import LoopSpec
from ..engine._pace import Pace
from ..engine.orders._levels import Nest, nests
from ..engine.orders._nested import Nested
from ..engine.reversals._together import Together, can_join
from ._cost import step_cost
from ._search import dividing
from ._work import rates

# What may be taken besides the slots that a schedule would have: as much again, or so
# many bytes where that is little.
_ALWAYS = 2**16
# What is gained are sums of the cotangents of parameters. To work out what a step costs
# takes a while, and with fewer bytes of them than this there is nothing to be gained.
_PARAMETERS = 2**13
_PER_CARRY = 16
_BATCH_SIZES = (8, 12, 16, 20, 24, 32, 64)
_MOST_PARTS = 8
# Times that differ by less are alike: estimates are not as good as that.
_ALIKE = 1.03


def with_batches(loop: LoopSpec, plain: Layout) -> Layout:
    """The fastest layout with steps reversed together, or `plain` if none is faster."""
    # It takes at most twice the memory of the slots of `plain`, or 64 KiB, plus the
    # size of the cotangents of the parameters. Of those that are about as fast it is
    # that of the smallest program. Time and memory are estimated.
    problem, active = loop._problem, loop._active
    consts = pick(problem.step.const_types, active.consts)
    sizes = [size for t in problem.step.jaxpr.in_avals for size in t.shape]
    if any(map(is_symbolic, sizes)):
        return plain
    enough = max(_PARAMETERS, _PER_CARRY * loop.carry_bytes)
    if loop.length < 4 or nbytes(consts) < enough or not can_join(problem.step):
        return plain
    cost = step_cost(problem, active)
    pace = Pace(cost, rates())
    room = max(2 * plain.stored_bytes(cost), _ALWAYS) + cost.ct_consts
    # Without slots nothing is run again, and more levels would be of no use.
    every = _batched_layouts(loop.length) if cost.held else _batches_of(plain)
    fitting = [one for one in every if one.stored_bytes(cost) <= room]
    times = {layout: layout.duration(pace) for layout in (plain, *fitting)}
    enough = min(times.values()) * _ALIKE
    fast = [layout for layout, time in times.items() if time <= enough]
    # Each nest is a program of its own, with the step in it.
    return min(fast, key=lambda one: (len(one.order.levels), times[one]))


def _batches_of(plain: Layout) -> Iterator[Layout]:
    """The order of a layout, with batches of various sizes."""
    most = min(plain.order.adjacent, _BATCH_SIZES[-1])
    for size in range(_BATCH_SIZES[0], most + 1):
        if plain.order.adjacent % size == 0 or size in _BATCH_SIZES:
            yield dataclasses.replace(plain, reversal=Together(size))


def _batched_layouts(length: int) -> Iterator[Layout]:
    """Levels of about equal size, with one or several batches in the last."""
    base = 4
    while base < 2 * length:
        order = Nested(nests(length, min(base, length)))
        for parts in range(1, _MOST_PARTS + 1):
            # What is left of a level would be reversed step by step.
            size, left = divmod(order.adjacent, parts)
            if not left and _BATCH_SIZES[0] <= size <= _BATCH_SIZES[-1]:
                yield Layout(order, reversal=Together(size))
        # Steps that are left over need a program of their own, which takes as long to
        # compile as that of the others.
        for size in dict.fromkeys(dividing(length, size) for size in _BATCH_SIZES):
            if 2 * size <= length:
                yield Layout(_within(length, base, size), reversal=Together(size))
        base = round(base * 1.3)


def _within(length: int, base: int, size: int) -> Nested:
    """About so many batches at each level, and a last one of the steps of a batch."""
    first, *_ = nests(length // size, min(base, length // size))
    nest = Nest((*first.levels, size))
    return Nested((nest, *nests(length - nest.length, size)))
