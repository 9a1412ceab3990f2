"""What the pictures of the page show: which figures, against which, in which units."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ._results import Outcome, Row

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of a group: a line for each library, on logarithmic axes.

    Args:
        name: of its file.
        alt: what it shows, for those who cannot see it.
        title: stands above it.
        across: what is drawn across, of an outcome and one of its rows.
        up: what is drawn upwards, of an outcome and one of its rows.
        xlabel: stands below the horizontal axis.
        xunit: how its ticks are written.
        yunit: how those of the vertical axis are written.
        labels: where the lines are labelled: in a column at their ends, or beside them.
        joined: whether the points of a line are joined.
    """

    name: str
    alt: str
    title: str
    across: Callable[[Outcome, Row], float]
    up: Callable[[Outcome, Row], float]
    xlabel: str
    xunit: Callable[[float], str]
    yunit: Callable[[float], str]
    labels: Literal["at the end", "beside"] = "at the end"
    joined: bool = True

    def lines(self, outcomes: Sequence[Outcome]) -> Mapping[str, Points]:
        """The points of each line, from the rows that belong to one."""
        lines: dict[str, Points] = {}
        for outcome in outcomes:
            for row in outcome.rows:
                if row.line:
                    point = (self.across(outcome, row), self.up(outcome, row))
                    lines.setdefault(row.line, []).append(point)
        return lines


def seconds(value: float) -> str:
    """A duration, as a tick is written."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.999 * unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} s"


def nbytes(value: float) -> str:
    """An amount of memory, as a tick is written."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.999 * unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


def number(value: float) -> str:
    """How many."""
    return f"{value:,.0f}"


def _size(outcome: Outcome, row: Row) -> float:
    del row
    return outcome.size or 1


def _seconds(outcome: Outcome, row: Row) -> float:
    del outcome
    return row.seconds


def _compile_seconds(outcome: Outcome, row: Row) -> float:
    del outcome
    return row.compile_seconds


def _temp_bytes(outcome: Outcome, row: Row) -> float:
    del outcome
    return max(row.temp_bytes, 1)


def _relative(value: Callable[[Outcome, Row], float]) -> Callable[..., float]:
    """A value of a row, over that of the first row of its comparison."""
    return lambda outcome, row: value(outcome, row) / value(outcome, outcome.rows[0])


def times(value: float) -> str:
    """How many times the first row."""
    return f"{value:g} x"


PICTURES: Mapping[str, Sequence[Picture]] = {
    "length": (
        Picture(
            "length_time",
            "The time of a gradient over the number of steps, a line for each library",
            "Time of a gradient",
            _size,
            _seconds,
            "steps",
            number,
            seconds,
        ),
        Picture(
            "length_memory",
            "The temporary memory of a gradient over the number of steps, a line for "
            "each library",
            "Temporary memory of a gradient",
            _size,
            _temp_bytes,
            "steps",
            number,
            nbytes,
        ),
        Picture(
            "length_compile",
            "The time to trace and compile a gradient over the number of steps, a line "
            "for each library",
            "Time to trace and compile a gradient",
            _size,
            _compile_seconds,
            "steps",
            number,
            seconds,
        ),
    ),
    "frontier": (
        Picture(
            "frontier",
            "The time of a gradient against its temporary memory, a point for each "
            "setting of each library, and a line for the budgets of eqloop",
            "Time of a gradient of 4,096 steps",
            _temp_bytes,
            _seconds,
            "temporary memory",
            nbytes,
            seconds,
            labels="beside",
        ),
    ),
    "cells": (
        Picture(
            "cells",
            "The time and the temporary memory of the gradient of four recurrent "
            "cells, relative to lax.scan, a point for each cell and schedule",
            "Time of the gradients of four cells",
            _relative(_temp_bytes),
            _relative(_seconds),
            "temporary memory, relative to lax.scan",
            times,
            times,
            labels="beside",
            joined=False,
        ),
    ),
    "layers": (
        Picture(
            "layers_compile",
            "The time to trace and compile a gradient over the number of layers, for "
            "StackedLayers and for a Python loop",
            "Time to trace and compile a gradient",
            _size,
            _compile_seconds,
            "layers",
            number,
            seconds,
        ),
    ),
}
