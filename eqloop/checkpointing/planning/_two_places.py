"""Plans that store carries in two places: the fastest that keeps to the bytes of both.

What is stored by the forward pass goes to the second place, and what is stored while
steps are run again stays on the device. So the layouts of one place are layouts of two:
the outermost level of nested ones is far, or all slots of a `Revolved`. A third kind
has equal leaves, each of which is reversed by a `Revolved` on the device.
"""

import dataclasses
import math
from collections.abc import Iterator

from ..._arrays import nbytes as bytes_of
from ..._device import remembered_per_device
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ..engine.orders._revolved import Revolved
from ..engine.orders._segmented import Segmented
from ..engine.reversals._together import Together, can_join
from ..engine.slots._slots import AbstractSlots
from ._choice import fastest_of
from ._memory import device_bytes
from ._memory_guess import Guess, counted_bytes
from ._paces import Paces, move_time
from ._search import blocks_to_try, layouts, revolved, sizes

# Numbers of leaves, and of slots in each, are coarser than in one place: there are all
# pairs of them.
_COARSE = 1.25


@dataclasses.dataclass(frozen=True)
class SecondPlace:
    """Where carries may be stored other than on the device.

    Attributes:
        slots: The slots there.
        nbytes: How many bytes they may take.
    """

    slots: AbstractSlots
    nbytes: int


@remembered_per_device(maxsize=128)
def fastest_in_two_places(
    problem: Problem,
    active: Active,
    nbytes: int,
    second: SecondPlace,
    times: Paces,
    limit: float = math.inf,
) -> Layout | None:
    """The fastest layout within `nbytes` that has carries in both places.

    It is `None` if nothing is stored, none fits, or none is faster than the `limit`.
    """
    # `nbytes` is what it may take on the device, `limit` how long the layout takes that
    # is used otherwise.
    pace, far = times.base, _far_slots(second, times)
    if far < 1:
        return None
    move = move_time(problem, active, second.slots, times)
    timed = (
        (layout.duration(pace) + moves * move, layout)
        for layout, moves in _layouts(problem, second.slots, far)
        # What is counted on the device is the least that it takes there.
        if counted_bytes(layout, pace.cost) <= nbytes
        and times.has_short_program(layout)
    )
    faster = (item for item in timed if item[0] < limit)
    every = sorted(faster, key=lambda item: item[0])
    found = fastest_of(every, problem, active, nbytes, times)
    if found is None and limit == math.inf:
        # The compiler may share memory that was counted twice, so this may fit after
        # all. The error for too small a budget says that it does if it is named there.
        least = smallest_in_two_places(problem, second, times)
        if least and device_bytes(problem, active, least) <= nbytes:
            found = least
    return found


def pareto_in_two_places(
    problem: Problem, active: Active, second: SecondPlace, times: Paces, guess: Guess
) -> list[tuple[Layout, float]]:
    """The layouts that none beats in memory of the device and in time, roughly.

    Each comes with the time that it takes to move its carries.
    """
    # Their bytes are told from those of layouts in one place.
    pace, far = times.base, _far_slots(second, times)
    if far < 1:
        return []
    move = move_time(problem, active, second.slots, times)
    timed = [
        (layout.duration(pace) + moves * move, moves * move, layout)
        for layout, moves in _layouts(problem, second.slots, far)
        if times.has_short_program(layout) and not times.unknown(layout)
    ]
    found, least = list[tuple[Layout, float]](), math.inf
    for _, moving, layout in sorted(timed, key=lambda item: item[0]):
        if (size := guess(layout)) < least:
            found.append((layout, moving))
            least = size
    return found


def smallest_in_two_places(
    problem: Problem, second: SecondPlace, times: Paces
) -> Layout | None:
    """The layout that takes the least memory on the device, if there are carries.

    All slots are far, and steps are reversed one by one.
    """
    length, far = problem.loop.length, _far_slots(second, times)
    return Layout(Revolved(length, min(far, length)), second.slots) if far > 0 else None


def _far_slots(second: SecondPlace, times: Paces) -> int:
    """How many carries the second place has room for."""
    held = bytes_of(second.slots.packed_types(times.base.cost.held_types))
    # One more row is for carries that are not kept.
    return second.nbytes // held - 1 if held else 0


def _layouts(
    problem: Problem, slots: AbstractSlots, far: int
) -> Iterator[tuple[Layout, float]]:
    """The layouts from which to choose, with how many carries each of them moves."""
    length, joins = problem.loop.length, can_join(problem.step)
    stops = problem.as_run.loop.stops
    for layout in layouts(length, joins):
        order = layout.order
        if order.stores_residuals:
            continue
        order = order.by_carries() if stops else layout.slot_order
        if order.primal_slots <= far:
            yield dataclasses.replace(layout, order=order, slots=slots), order.moves
    for order in _equal_leaves(length, far):
        yield Layout(order, slots), order.moves
        if joins and order.block > 1:
            yield Layout(order, slots, Together(order.block)), order.moves


def _equal_leaves(length: int, far: int) -> Iterator[Segmented]:
    """Equal leaves, each of which is reversed with slots on the device.

    The first leaf is shorter if there are steps left over.
    """
    counts = sizes(min(far, length), _COARSE)
    leaves = dict.fromkeys(-(-length // count) for count in counts)
    for each in leaves:
        count, over = divmod(length, each)
        for block in blocks_to_try(each):
            for leaf in revolved(each, block, _COARSE):
                first = Revolved(over, leaf.slots, min(block, over))
                yield Segmented((*([(1, first)] if over else []), (count, leaf)))
