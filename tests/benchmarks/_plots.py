"""What the pictures of the page show: which figures, against which, in which units."""

import re
from collections.abc import Iterator, Mapping, Sequence

from ._lines import Lines
from ._ratios import Ratios, Series, Strip
from ._results import Outcome, Row
from ._style import OURS, AbstractPicture

_TIME = Series("time", OURS)
_MEMORY = Series("memory", "#767676", "s", 5.5, filled=False)


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


def _beside_lax_scan(outcome: Outcome) -> Iterator[Strip]:
    """Each loop of a recurrent cell, relative to the first, which is `lax.scan`."""
    first, *others = outcome.rows
    _, cell = outcome.title.split(": ")
    for row in others:
        time = row.seconds / first.seconds
        memory = row.temp_bytes / first.temp_bytes
        yield Strip(cell, _in_short(row), [(_TIME, time), (_MEMORY, memory)])


def _in_short(row: Row) -> str:
    """The name of a row, with a budget in MB."""
    budget = re.fullmatch(r"Budget\((\d+)\)", row.name)
    return f"Budget, {int(budget[1]) / 1e6:.1f} MB" if budget else row.line


def _regret(outcome: Outcome) -> Iterator[Strip]:
    """The budgets of a problem that something else fits into, from the least."""
    figures = {verdict.text: verdict.figure for verdict in outcome.verdicts}
    start, end = "temporary memory of ", "over the fastest of the others that fit"
    budgets = sorted(
        (verdict.at_most, verdict.text.removeprefix(start))
        for verdict in outcome.verdicts
        if verdict.text.startswith(start)
    )
    ratios = [figures.get(f"time, {name} {end}", 0.0) for _, name in budgets]
    dots = [
        (Series("", OURS, size=4.0 + 2.0 * i, filled=False), ratio)
        for i, ratio in enumerate(ratios)
        if ratio > 0
    ]
    if dots:
        yield Strip(outcome.title, "", dots)


def _beside_diffrax(outcome: Outcome) -> Iterator[Strip]:
    """What an adjoint takes over another one, as it was claimed."""
    equation, saved = outcome.title.split(": ")
    time, memory = (verdict.figure for verdict in outcome.verdicts)
    yield Strip(
        equation, saved.removesuffix(" saved"), [(_TIME, time), (_MEMORY, memory)]
    )


def _headline(outcome: Outcome) -> Iterator[Strip]:
    """A loop of the front page, relative to `lax.scan`."""
    theirs, ours = outcome.rows
    (time,) = outcome.verdicts
    memory = ours.temp_bytes / theirs.temp_bytes
    yield Strip(outcome.title, "", [(_TIME, time.figure), (_MEMORY, memory)])


HEADLINES = Ratios(
    "headlines",
    "Time and memory of eqloop relative to lax.scan, for each loop of the table",
    "eqloop over lax.scan",
    "ratio: on the left of the line, eqloop takes less",
    _headline,
)

PICTURES: Mapping[str, Sequence[AbstractPicture]] = {
    "length": (
        Lines(
            "length_time",
            "The time of a gradient over the number of steps, a line for each library",
            "Time of a gradient",
            "steps",
            _size,
            _seconds,
            number,
            seconds,
        ),
        Lines(
            "length_memory",
            "The temporary memory of a gradient over the number of steps, a line for "
            "each library",
            "Temporary memory of a gradient",
            "steps",
            _size,
            _temp_bytes,
            number,
            nbytes,
        ),
        Lines(
            "length_compile",
            "The time to trace and compile a gradient over the number of steps, a line "
            "for each library",
            "Time to trace and compile a gradient",
            "steps",
            _size,
            _compile_seconds,
            number,
            seconds,
        ),
    ),
    "frontier": (
        Lines(
            "frontier",
            "The time of a gradient against its temporary memory, a point for each "
            "setting of each library, and a line for the budgets of eqloop",
            "Time of a gradient of 4,096 steps",
            "temporary memory",
            _temp_bytes,
            _seconds,
            nbytes,
            seconds,
            labels="beside",
        ),
    ),
    "cells": (
        Ratios(
            "cells",
            "The time and the temporary memory of the gradient of four recurrent "
            "cells, relative to lax.scan, a strip for each schedule",
            "Gradients of recurrent cells",
            "relative to lax.scan; less is better",
            _beside_lax_scan,
        ),
    ),
    "regret": (
        Ratios(
            "regret",
            "The time of a gradient within a budget, relative to the fastest of the "
            "other loops that fit into it, a dot for each budget",
            "Budgets and the fastest plan that fits",
            "time, relative to the fastest other that fits\n"
            "larger circles are larger budgets",
            _regret,
        ),
    ),
    "diffrax": (
        Ratios(
            "diffrax",
            "The time and the temporary memory of the gradient of a solve by Diffrax "
            "with the adjoint of eqloop, relative to Diffrax's own adjoint, a strip "
            "for what is saved of each equation",
            "Diffrax with the adjoint of eqloop",
            "relative to RecursiveCheckpointAdjoint;\nless is better",
            _beside_diffrax,
        ),
    ),
    "layers": (
        Lines(
            "layers_compile",
            "The time to trace and compile a gradient over the number of layers, for "
            "StackedLayers and for a Python loop",
            "Time to trace and compile a gradient",
            "layers",
            _size,
            _compile_seconds,
            number,
            seconds,
        ),
    ),
}
