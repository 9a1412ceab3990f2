"""The arrays that are alive where a compiled program takes the most memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from .._calls import format_bytes
from .._programs import lowered
from .._types import PyTree, Value
from ._alive import Alive
from ._dump import compiled, with_all_frames
from ._lives import heaps_of
from ._origins import Origins
from ._program import CompiledProgram


def arrays_at_peak(program: CompiledProgram) -> list[Alive]:
    """Those that come and go, on the device and on its host, each where most is."""
    origins, found = Origins(program), list[Alive]()
    for heap in heaps_of(program):
        each = (origins.of(life, heap.peak) for life in heap.at_peak)
        arrays = (one for one in each if one.dtype)  # and no tables of those in a tuple
        found += (replace(one, is_on_host=heap.is_on_host) for one in arrays)
    return found


def largest_array(run: Callable[..., PyTree], types: Sequence[Value]) -> str:
    """A sentence on the largest array in a program, empty if it is not known."""
    with with_all_frames():
        try:
            program, _ = compiled(lowered(run, types))
        except RuntimeError:  # a compiler that tells nothing
            return ""
    there = [one for one in arrays_at_peak(program) if not one.is_on_host]
    if not there:
        return ""
    one = max(there, key=lambda one: one.nbytes)
    line = f", of {one.place}" if one.place else ""
    size = format_bytes(one.nbytes)
    return f"The largest array in it is {one.type_in_words}, {size}{line}."
