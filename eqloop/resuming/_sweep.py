"""Goes through the segments of a loop, there or back, and stores what they make."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .._arrays import Axis
from .._types import Aval, Value
from ._disk import make_folder, remove_leftovers
from ._processes import is_leader, wait_for_all
from ._row_file import RowFile
from ._run_record import RunRecord
from ._segment_inputs import SegmentInputs
from ._sources import AbstractSource
from ._state_folder import StateFolder, pieces_of

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentSweep:
    """The way through a loop, or the way back.

    Attributes:
        run: What a segment does, `(k, state, *inputs) -> (state, rows)`.
        start: The state before the first segment.
        states: Those after each segment, by the number of steps of the loop before it.
        rows: The files of what segments make besides.
        axes: For each the axis along which segments follow each other; `None` for what
            all have in common.
        others: What segments get besides their inputs.
        is_back: Whether the last segment comes first.
    """

    run: Callable[..., tuple[list[Value], list[Value]]]
    inputs: SegmentInputs
    start: list[Value]
    states: StateFolder
    rows: list[RowFile]
    axes: Sequence[Axis]
    others: tuple[AbstractSource, ...] = ()
    is_back: bool = False

    @property
    def done(self) -> int:
        """How many steps it has made."""
        return max((abs(n - self._first) for n in self.states.steps), default=0)

    @property
    def result(self) -> list[Value]:
        """The state at its end."""
        return self.state_at(self.inputs.segments.length - self._first)

    def state_at(self, steps: int) -> list[Value]:
        """The state where so many steps of the loop are before it."""
        return self.start if steps == self._first else self.states.read(steps)

    def begin(self, record: Path, now: RunRecord, rows: Path, *words: str) -> None:
        """Makes the files of a run, or a gradient, or sees that they are those of it.

        `record` is the file of `now`; for the words see `RunRecord.check`.
        """
        found = RunRecord.read(record)
        if found is not None:
            found.check(now, record.parent, *words)
        if is_leader():
            make_folder(record.parent)
            for folder in (record.parent, self.states.path, rows):
                remove_leftovers(folder)
            if found is None:
                now.write(record)
            make_folder(self.states.path)
            if not (are_used := bool(self.states.steps)):
                make_folder(rows)
            for file in self.rows:
                file.check() if are_used else file.make()
        wait_for_all(f"{record} was begun")

    def go_on(self, keep: int | None, moved: Callable[..., None]) -> None:
        """Runs what is left, and keeps so many states; for `None`, all of them.

        If it keeps all, it also makes those missing before the last one that is there.
        """
        order = range(len(self.inputs.segments))[:: -1 if self.is_back else 1]
        is_stored = self.states.are_stored(map(self._after, order))
        left = [k for k, flag in zip(order, is_stored, strict=True) if not flag]
        if keep is not None:
            last = max((i for i, flag in enumerate(is_stored) if flag), default=-1)
            left = list(order[last + 1 :])
        for k, state, rows in _one_behind(self._computed(left)):
            self._write_rows(self.inputs.segments.bounds(k)[0], rows)
            self.states.write(self._after(k), state)
            if keep is not None:
                stored = sorted(self.states.steps, reverse=self.is_back)
                self.states.forget(stored[:-keep])
            moved(abs(self._after(k) - self._first), state, rows)

    def before(self, k: int) -> int:
        """Where it is in the loop before it comes to a segment."""
        return self.inputs.segments.done(k + 1 if self.is_back else k)

    def _after(self, k: int) -> int:
        return self.inputs.segments.done(k if self.is_back else k + 1)

    @property
    def _first(self) -> int:
        return self.inputs.segments.length if self.is_back else 0

    def _computed(self, left: Sequence[int]) -> Iterator[tuple[int, Value, Value]]:
        """What each of these segments makes, which may still be being computed."""
        state, at = list[Any](), None
        given = self.inputs.read(left, *self.others)
        for k, inputs in zip(left, given, strict=True):
            if at != self.before(k):
                state = self.state_at(self.before(k))
            state, rows = self.run(k, state, *inputs)
            at = self._after(k)
            yield k, state, rows

    def _write_rows(self, start: int, arrays: Sequence[Value]) -> None:
        """Writes what a segment has made, and waits until it is on the disk."""
        for file, axis, array in zip(self.rows, self.axes, arrays, strict=True):
            moved = [start if i == axis else 0 for i in range(array.ndim)]
            pieces = pieces_of(array)
            file.write((np.add(place, moved), piece) for place, piece in pieces)


def _one_behind(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, each when the one after it has been made.

    >>> list(_one_behind("abc"))
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
