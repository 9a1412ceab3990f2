"""Keeps what processes say: in a file, after each word, and printed."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ._groups import GROUPS, Size
from ._processes import NotDone, Task
from ._rows import Key, Row, load, merged, save


class Found:
    """What was found so far.

    Args:
        size: The sizes of the problems.
        file: Where it is kept, with what was there before; `None` for nowhere.
        start: When all began, by `time.monotonic`.
    """

    def __init__(self, size: Size, file: Path | None, start: float):
        self._size, self._file, self._start = size, file, start
        self._before = load(file) if file else {}
        self._rows = dict[Key, Row]()
        self._said = set[tuple[Any, ...]]()

    def add(self, task: Task, said: Row | NotDone) -> None:
        """Keeps a row, or what a whole unit was lost to."""
        if isinstance(said, NotDone):
            self._say(f"{task.group} | {task.step}: {said.why}")
            rows = list(self._lost(task, said))
        else:
            rows = [said]
            # Of a program that is run there is more to come, which is not said.
            state = said.key, said.wrong, bool(said.seconds), said.compile_seconds
            if state not in self._said:
                self._say(_line(said))
            self._said.add(state)
        self._rows.update({row.key: row for row in rows})
        if self._file and self._rows:
            save(merged(self._before, self._rows.values()), self._file)

    def _lost(self, task: Task, said: NotDone) -> Iterator[Row]:
        """The rows of a unit that was not done to its end."""
        # They are of this device, and of this day, if anything is known of these.
        for any_row in list(self._rows.values())[:1]:
            for program in _programs(task, self._size):
                blank = any_row.blank(task.group, task.step, program)
                row = self._rows.get(blank.key, blank)
                if not row.seconds and not row.wrong:
                    yield dataclasses.replace(row, wrong=said.why)

    def _say(self, line: str) -> None:
        print(f"{time.monotonic() - self._start:5.0f} s  {line}", flush=True)

    def summary(self, runs: int) -> int:
        """Prints what came of it; 1 if that is nothing.

        Args:
            runs: How often each program is run, or would be.
        """
        rows = list(self._rows.values())
        compiled = [row for row in rows if row.compile_seconds is not None]
        measured = [row for row in rows if row.seconds]
        total = lambda values: sum(value or 0.0 for value in values)
        foreseen = total(sum(row.foreseen.values()) for row in rows)
        wrong = sum(bool(row.wrong) for row in rows)
        print(
            f"{len(rows)} programs: {len(compiled)} compiled, {len(measured)} "
            f"measured, {wrong} not to the end.\nTime added up over processes: "
            f"{total(row.plan_seconds for row in rows):.0f} s to trace and plan, "
            f"{total(row.compile_seconds for row in rows):.0f} s to compile.\n"
            f"On the device, as foreseen where loops have known lengths: "
            f"{runs * foreseen:.0f} s for {runs} runs of each."
        )
        return int(not compiled)


def _programs(task: Task, size: Size) -> Sequence[str]:
    units = GROUPS[task.group].units(size)
    unit = next(one for one in units if one.step == task.step)
    return [program.name for program in unit.programs]


def _line(row: Row) -> str:
    said = [f"{row.group} | {row.step} | {row.name}:"]
    if row.wrong:
        said.append(row.wrong)
    if row.seconds:
        said.append(f"{1e3 * statistics.median(row.seconds):.2f} ms")
    if row.foreseen:
        said.append(f"({1e3 * sum(row.foreseen.values()):.2f} foreseen)")
    if row.temp is not None:
        said.append(f"{row.temp / 2**20:.1f} MiB")
    if row.plan_seconds is not None:
        said.append(f"planned in {row.plan_seconds:.1f} s")
    if row.compile_seconds is not None:
        said.append(f"compiled in {row.compile_seconds:.1f} s")
    if row.error is not None:
        said.append(f"{row.error:.0e} off")
    return " ".join(said)
