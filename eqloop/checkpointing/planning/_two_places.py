"""Plans with carries in two places: the fastest that keeps to the bytes of both."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from ..engine._costs import StepCost
from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._loop import nbytes
from ..engine._pace import AbstractPace
from ..engine._problem import Problem
from ..engine.orders._hierarchical import Hierarchical
from ..engine.reversals._block_reversals import AbstractReversal, ByResiduals
from ..engine.reversals._together import Together, can_join
from ..engine.slots._slots import AbstractSlots
from ._choice import WORTHWHILE
from ._cost import step_cost
from ._measured_pace import move_time
from ._memory import peak_bytes
from ._memory_guess import working_set
from ._search import blocks_to_try

# A search compiles programs until no layout promises to be worthwhile, or this often.
_MOST_PROGRAMS = 8


@dataclasses.dataclass(frozen=True)
class SecondPlace:
    """Where carries may be stored besides the device.

    Attributes:
        slots: The slots there.
        nbytes: How many bytes they may take.
    """

    slots: AbstractSlots
    nbytes: int


@functools.lru_cache(maxsize=128)
def fastest_in_two_places(
    problem: Problem,
    active: Active,
    nbytes: int,
    second: SecondPlace,
    pace: AbstractPace,
) -> Layout | None:
    """The layout that takes the least time with carries in both places.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.
        nbytes: How many bytes it may take on the device.
        second: The other place.
        pace: How long the pieces of a gradient take.

    Returns:
        The layout, or `None` if there is nothing to store, or none fits.
    """
    search = _search_for(problem, active, second, pace)
    if search is None:
        return None
    found: _Option | None = None
    limit, tried = math.inf, set[_Option]()
    spare = _Spare(working_set(pace.cost))
    for _ in range(_MOST_PROGRAMS):
        options = search.options(nbytes, spare)
        left = {
            option: time
            for option in options
            if option not in tried
            and (time := search.layout(option).duration(pace)) < limit
        }
        if not left:
            break
        # Those that should not fit are tried last, the smallest of them first.
        over = lambda option: max(search.counted(option) + spare(option) - nbytes, 0)
        option = min(left, key=lambda option: (over(option), left[option]))
        tried.add(option)
        size = device_bytes(problem, active, search.layout(option))
        spare.learn(option, size - search.counted(option))
        if size <= nbytes:
            found, limit = option, WORTHWHILE * left[option]
    if found is None:
        # The compiler may share memory that was counted twice, so this may fit after
        # all. Errors say that it does if it is what they name.
        smallest = search.smallest
        if device_bytes(problem, active, search.layout(smallest)) <= nbytes:
            found = smallest
    return None if found is None else search.layout(found)


def smallest_in_two_places(
    problem: Problem, active: Active, second: SecondPlace, pace: AbstractPace
) -> Layout | None:
    """The layout that takes the least memory on the device, if there are carries."""
    search = _search_for(problem, active, second, pace)
    return None if search is None else search.layout(search.smallest)


def device_bytes(problem: Problem, active: Active, layout: Layout) -> int:
    """The bytes that a layout takes on the device, on a CPU those of its host aside."""
    size = peak_bytes(problem, active, layout)
    if not layout.slots.take_device_memory:
        return size
    elsewhere = layout.bytes_elsewhere(layout.stored_cost(step_cost(problem, active)))
    # A little was added to all that was measured, and so to these.
    return size - elsewhere - elsewhere // 200


class _Option(NamedTuple):
    """An order of two places, and how its blocks are taken back."""

    order: Hierarchical
    reversal: AbstractReversal

    @property
    def key(self) -> Hashable:
        """What it has in common with those that have other numbers of slots."""
        return self.order.block_size, self.reversal


class _Spare:
    """What programs take besides what was counted: as was guessed, or as was seen."""

    def __init__(self, guess: int):
        self._latest, self._seen = guess, dict[Hashable, int]()

    def __call__(self, option: _Option) -> int:
        return self._seen.get(option.key, self._latest)

    def learn(self, option: _Option, spare: int) -> None:
        """Takes note of what was seen. It is a good guess for others, too."""
        self._latest = self._seen[option.key] = spare


@dataclasses.dataclass(frozen=True)
class _PlaceSearch:
    """Layouts with so many far slots.

    Attributes:
        problem: The loop.
        active: Which of its inputs are differentiated.
        slots: The far slots.
        far: How many there are.
        move: What it takes to write or to read one, in units of an evaluation.
        cost: What a step costs.
    """

    problem: Problem
    active: Active
    slots: AbstractSlots
    far: int
    move: float
    cost: StepCost

    def layout(self, option: _Option) -> Layout:
        """The layout of an option."""
        return Layout(option.order, self.slots, option.reversal)

    @property
    def smallest(self) -> _Option:
        """Steps that are reversed one by one, with a single near slot."""
        return _Option(self._order(1), ByResiduals())

    def options(self, nbytes: int, spare: _Spare) -> list[_Option]:
        """Blocks of each size, which are reversed in each way, with many near slots.

        There are as many as there should be room for. Blocks for which there is none
        are left out.
        """
        options = [self._with_room(kind, nbytes - spare(kind)) for kind in self._kinds]
        return [option for option in options if self.counted(option) <= nbytes]

    def counted(self, option: _Option) -> int:
        """The bytes of near slots and of blocks."""
        return option.order.stored_bytes(self.cost, option.reversal, first=False)

    @property
    def _kinds(self) -> Iterator[_Option]:
        """The options with a single near slot."""
        joins = can_join(self.problem.step)
        for block in blocks_to_try(self.problem.loop.length):
            yield _Option(self._order(block), ByResiduals())
            if joins and block > 1:
                yield _Option(self._order(block), Together(block))

    def _with_room(self, kind: _Option, room: int) -> _Option:
        """The option with as many near slots as there is room for, and at least one."""
        left = room - self.counted(kind)
        more = max(left // kind.order.near_slot_bytes(self.cost), 0)
        near = min(1 + more, kind.order.blocks.count)
        return kind._replace(order=dataclasses.replace(kind.order, near=near))

    def _order(self, block: int) -> Hierarchical:
        length = self.problem.loop.length
        far = min(self.far, -(-length // block))
        return Hierarchical(length, 1, far, self.move, block)


def _search_for(
    problem: Problem, active: Active, second: SecondPlace, pace: AbstractPace
) -> _PlaceSearch | None:
    held = nbytes(second.slots.packed_types(pace.cost.held_types))
    # One more row is for carries that find no free slot.
    far = second.nbytes // held - 1 if held else 0
    if far < 1:
        return None
    move = move_time(problem, active, second.slots, pace) / pace.advance
    return _PlaceSearch(problem, active, second.slots, far, round(move, 3), pace.cost)
