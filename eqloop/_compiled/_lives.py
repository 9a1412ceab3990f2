"""When each buffer of a compiled program is alive, and where most are at once.

The compiler plans its heap by a sequence of events: a buffer comes, it goes, or it
joins another one, whose memory it takes over. What has joined is one life: the carry of
a loop, say, from the zeros that it begins with to what is read of it afterwards.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from ._program import Allocation, CompiledProgram, HeapEvent

# The kind of this event.
_GOES = 1


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
        is_on_host: Whether it is in the memory of the host.
    """

    nbytes: int
    lives: Sequence[Life]
    length: int
    is_on_host: bool

    @functools.cached_property
    def peak(self) -> int:
        """The event at which most is alive."""
        return max(range(self.length), key=self.live(self.lives).__getitem__)

    @property
    def at_peak(self) -> list[Life]:
        """What is alive where most is."""
        return [life for life in self.lives if life.start <= self.peak < life.end]

    def live(self, lives: Sequence[Life]) -> list[int]:
        """The bytes of some of it that are alive after each event."""
        changes = [0] * (self.length + 1)
        for life in lives:
            changes[life.start] += life.nbytes
            changes[life.end] -= life.nbytes
        return list(itertools.accumulate(changes))[: self.length]


def heaps_of(program: CompiledProgram) -> list[Heap]:
    """The heaps of a program: each allocation in which buffers take turns."""
    events = dict[int, Sequence[HeapEvent]]()
    # The trace of a heap may have the wrong number of its allocation.
    for heap in program.heaps:
        events.update(dict.fromkeys((event.buffer for event in heap), heap))
    found = list[Heap]()
    for one in program.allocations:
        if one.is_temporary:
            trace = next((events[x] for x in one.buffers if x in events), ())
            known = [event for event in trace if event.buffer in one.buffers]
            lives = _lives(program, one, known)
            found.append(Heap(one.nbytes, lives, max(len(known), 1), one.is_on_host))
    return found


def _lives(
    program: CompiledProgram, allocation: Allocation, events: Sequence[HeapEvent]
) -> list[Life]:
    if not events:  # It is there from the beginning to the end.
        every = tuple(allocation.buffers)
        return [Life(allocation.nbytes, 0, 1, every, (0,) * len(every))]
    comes = {event.buffer: i for i, event in enumerate(events) if event.kind != _GOES}
    goes = {event.buffer: i for i, event in enumerate(events) if event.kind == _GOES}
    found = dict[int, list[Life]]()
    for buffer, start in comes.items():
        end, size = goes.get(buffer, len(events)), program.buffers[buffer].nbytes
        life = Life(size, start, end, (buffer,), (start,))
        there = found.setdefault(allocation.buffers[buffer], [])
        # The compiler does not always write down that a buffer joins another one. But
        # what is in the same place at the same time has done so.
        if there and start < there[-1].end:
            last = there.pop()
            life = Life(
                max(last.nbytes, size),
                last.start,
                max(last.end, end),
                (*last.buffers, buffer),
                (*last.comes, start),
            )
        there.append(life)
    return list(itertools.chain(*found.values()))
