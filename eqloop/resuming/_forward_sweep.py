"""Runs the segments of a loop that were not run yet, and stores what they make."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from .._arrays import Axis
from .._types import Aval, PyTree, Value
from ..loops import cuts_of
from ._disk import make_folder
from ._row_file import RowFile
from ._segment_call import SegmentCall
from ._segments import Segments
from ._sources import AbstractSource, read_ahead
from ._state_folder import StateFolder, pieces_of
from ._status import CARRIES, YS
from ._step_keys import StepKeys

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentInputs:
    """What the segments of a loop get.

    Attributes:
        cut_every: How many steps lie between two cuts, if the scan is truncated.
    """

    segments: Segments
    scan: AbstractSource
    xs: AbstractSource
    keys: StepKeys
    cut_every: int | None

    def read(
        self, which: Iterable[int], *others: AbstractSource
    ) -> Iterator[tuple[Value, ...]]:
        """What each of these segments gets, which is read a segment ahead."""
        # The cuts are counted in the whole loop.
        which = list(which)
        bounds = [self.segments.bounds(k) for k in which]
        parts = read_ahead([self.scan, self.xs, *others], bounds)
        for k, at, part in zip(which, bounds, parts, strict=True):
            yield *part, (self.keys.take(*at), self._cuts(k))

    def beside_types(self, steps: int) -> tuple[PyTree, PyTree]:
        """The types of the keys and the cuts of so many steps."""
        marks = jax.ShapeDtypeStruct((steps,), np.dtype(bool))
        return self.keys.type(steps), None if self.cut_every is None else marks

    def _cuts(self, k: int) -> np.ndarray | None:
        """Before which steps of a segment the carry is cut."""
        if self.cut_every is None:
            return None
        start, size = self.segments.done(k), self.segments.size(k)
        reverse = self.segments.reverse
        return cuts_of(self.cut_every, size, start=start, reverse=reverse)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardSweep:
    """The loop itself.

    Attributes:
        moved: Called with the number of steps that were run, the arrays of the carry
            and those of the last `ys`.
    """

    call: SegmentCall
    inputs: SegmentInputs
    directory: Path
    moved: Callable[[int, PyTree, PyTree], None]

    @property
    def carries(self) -> StateFolder:
        """Where the carries are that segments start with."""
        form = self.call.carry
        path = self.directory / CARRIES
        return StateFolder(path, form.names, form.types, self.call.shardings)

    @property
    def ys(self) -> list[RowFile]:
        """The files of what the steps returned."""
        return row_files(self.directory / YS, self.call.ys.types)

    def carry_before(self, k: int) -> list[Value]:
        """The arrays of the carry that segment `k` starts with."""
        steps = self.call.segments.done(k)
        return self.carries.read(steps) if steps else self.call.start

    def run(self, keep: int | None) -> None:
        """Runs what is left."""
        # If all carries are kept, those before the last one that is there are run as
        # well.
        segments, carries = self.call.segments, self.carries
        ends = map(segments.done, range(1, len(segments) + 1))
        is_stored = carries.are_stored(ends)
        left = [k for k, flag in enumerate(is_stored) if not flag]
        if keep is not None and any(is_stored):
            last = max(k for k, flag in enumerate(is_stored) if flag)
            left = [k for k in left if k > last]
        for k, carry, ys in one_behind(self._computed(left)):
            write_rows(self.ys, self.call.y_axes, segments.bounds(k)[0], ys)
            done = segments.done(k + 1)
            carries.write(done, carry)
            if keep is not None:
                carries.forget(carries.steps[:-keep])
            self.moved(done, carry, ys)

    def _computed(self, left: Sequence[int]) -> Iterator[tuple[int, Value, Value]]:
        """What each of these segments makes, which may still be being computed."""
        program = self.call.program
        carry, before = [], -2
        inputs = self.inputs.read(left)
        for k, (scan, xs, beside) in zip(left, inputs, strict=True):
            if k != before + 1:
                carry = self.carry_before(k)
            size = self.call.segments.size(k)
            carry, ys = program(size, scan, xs, carry, beside)
            before = k
            yield k, carry, ys


def one_behind(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, each when the one after it has been made.

    >>> list(one_behind("abc"))
    ['a', 'b', 'c']
    """
    # So the device has something to do while what it did before is written to the disk.
    waiting: list[_Item] = []
    try:
        for item in items:
            waiting.append(item)
            if len(waiting) > 1:
                yield waiting.pop(0)
    except Exception:  # what was computed before is not lost
        yield from waiting
        raise
    yield from waiting


def row_files(folder: Path, types: Sequence[Aval]) -> list[RowFile]:
    """The files in a folder for arrays of these types."""
    return [
        RowFile(folder / f"{i}.npy", tuple(aval.shape), np.dtype(aval.dtype))
        for i, aval in enumerate(types)
    ]


def write_rows(
    files: Sequence[RowFile], axes: Sequence[Axis], start: int, arrays: Sequence[Value]
) -> None:
    """Writes what a segment has made, and waits until it is on the disk."""
    # An axis is that along which segments follow each other; `None` for what all have
    # in common.
    for file, axis, array in zip(files, axes, arrays, strict=True):
        with file.writing() as rows:
            for place, piece in pieces_of(array):
                if axis is not None:
                    place[axis] += start
                rows.write(place, piece)


def open_files(folder: Path, files: Sequence[RowFile], *, are_used: bool) -> None:
    """Makes a folder with these files, unless they are there; checks those in use."""
    if not are_used:
        make_folder(folder)
    for file in files:
        file.check() if are_used else file.make()
