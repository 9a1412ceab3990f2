"""When each buffer of a compiled program is alive, and where most are at once.

The compiler plans its heap by a sequence of events: a buffer comes, it goes, or it
joins another one, whose memory it takes over. What has joined is one life: the carry of
a loop, say, from the zeros that it begins with to what is read of it afterwards.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from ._program import Allocation, Event, Program

# Kinds of events.
_GOES, _JOINS = 1, 2


@dataclasses.dataclass(frozen=True)
class Life:
    """Memory from when it is taken to when it is free.

    Attributes:
        nbytes: How much.
        start: The event before which it is not alive.
        end: The event from which on it is not alive any more.
        buffers: The buffers that have it, in the order in which they come.
        comes: The event at which each of them comes.
    """

    nbytes: int
    start: int
    end: int
    buffers: tuple[int, ...]
    comes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Heap:
    """What is in a heap.

    Attributes:
        nbytes: What is assigned to it, which can be more than is alive at once.
        lives: What comes and goes in it.
        length: How many events there are.
        peak: The event at which most is alive.
        is_on_host: Whether it is in the memory of the host.
    """

    nbytes: int
    lives: Sequence[Life]
    length: int
    peak: int
    is_on_host: bool

    @property
    def at_peak(self) -> list[Life]:
        """What is alive where most is."""
        return [life for life in self.lives if life.start <= self.peak < life.end]

    def live(self) -> list[int]:
        """The bytes that are alive after each event."""
        return self.live_of(self.lives)

    def live_of(self, lives: Sequence[Life]) -> list[int]:
        """The bytes of some of it that are alive after each event."""
        return _live(lives, self.length)


def heaps_of(program: Program) -> list[Heap]:
    """The heaps of a program: each allocation in which buffers take turns."""
    events = {}
    # The trace of a heap may have the wrong number of its allocation.
    for heap in program.heaps:
        events.update(dict.fromkeys((event.buffer for event in heap), heap))
    found = list[Heap]()
    for allocation in program.allocations:
        if allocation.is_temporary:
            traces = (events[x] for x in allocation.buffers if x in events)
            found.append(_heap_of(program, allocation, next(traces, ())))
    return found


def _heap_of(program: Program, allocation: Allocation, events: Sequence[Event]) -> Heap:
    sizes = {x: program.buffers[x].nbytes for x in allocation.buffers}
    known = [event for event in events if event.buffer in sizes]
    lives = _joined(_lives(known, sizes), allocation)
    if not lives:  # Such a one is there from the beginning to the end.
        all_of_it = tuple(allocation.buffers)
        lives = [Life(allocation.nbytes, 0, 1, all_of_it, (0,) * len(all_of_it))]
    length = max(len(known), 1)
    live = _live(lives, length)
    peak = max(range(length), key=live.__getitem__)
    return Heap(allocation.nbytes, lives, length, peak, allocation.is_on_host)


def _joined(lives: Sequence[Life], allocation: Allocation) -> list[Life]:
    """Lives, of which those that are in the same place at the same time are one.

    The compiler does not always write down that a buffer joins another one.
    """
    found = dict[int, list[Life]]()
    for life in sorted(lives, key=lambda life: life.start):
        there = found.setdefault(allocation.buffers[life.buffers[0]], [])
        if there and life.start < there[-1].end:
            last = there.pop()
            life = Life(
                max(last.nbytes, life.nbytes),
                last.start,
                max(last.end, life.end),
                last.buffers + life.buffers,
                last.comes + life.comes,
            )
        there.append(life)
    return list(itertools.chain(*found.values()))


def _live(lives: Sequence[Life], length: int) -> list[int]:
    changes = [0] * (length + 1)
    for life in lives:
        changes[life.start] += life.nbytes
        changes[life.end] -= life.nbytes
    return list(itertools.accumulate(changes))[:length]


def _lives(events: Sequence[Event], sizes: Mapping[int, int]) -> list[Life]:
    found, at = list[Life](), dict[int, _Comers]()

    def close(comers: _Comers, end: int) -> None:
        buffers, comes = zip(*comers.came, strict=True)
        size = max(sizes[buffer] for buffer in buffers)
        found.append(Life(size, comes[0], end, buffers, comes))

    for time, (kind, buffer, joined) in enumerate(events):
        if kind == _GOES:
            comers = at.pop(buffer)
            comers.left -= 1
            if not comers.left:
                close(comers, time)
            continue
        comers = at.get(joined) if kind == _JOINS else None
        at[buffer] = comers = comers or _Comers()
        comers.came.append((buffer, time))
        comers.left += 1
    for comers in {id(comers): comers for comers in at.values()}.values():
        close(comers, len(events))
    return found


@dataclasses.dataclass
class _Comers:
    """Buffers that share memory, with when they came, and how many have not gone."""

    came: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    left: int = 0
