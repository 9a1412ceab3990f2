"""The part of *On a GPU and a TPU* that tells of times."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from ..benchmarks._report import folded, milliseconds, table
from ._fitting import fitted_rates
from ._groups import GROUPS, as_it_is
from ._rows import Row, Rows

_NOTHING = """\
## Times on a GPU

None have been measured yet. `python -m tests.on_gpu` measures them in nine minutes; the
[section on tests](contributing.md#tests) says how.
"""

_INTRODUCTION = """\
Measured by `python -m tests.on_gpu`, whose figures are in [gpu.json](gpu.json). The
programs of a table are run in turn, five times, on a machine that does nothing else.
**Time** is the median, with the least in brackets. **Memory** is besides inputs and
outputs. **Allocated** is the most that the allocator of the device gave a program, its
outputs among that. **Difference** is the greatest from the first row, relative to the
greatest entry of an array; products are rounded as JAX rounds them by default.
**Foreseen** is what the roofline says, which `Budget` goes by where nothing can be run.
"""

# The rows of a unit, in their order.
_Unit: TypeAlias = Sequence[Row]


def text(rows: Rows) -> str:
    """The times of each device."""
    devices = dict.fromkeys(row.device for row in rows.values() if row.seconds)
    if not devices:
        return _NOTHING
    each = ([row for row in rows.values() if row.device == name] for name in devices)
    return "\n".join(map(_of_device, each))


def _of_device(rows: Sequence[Row]) -> str:
    device = rows[0].device
    parts = [f"## Times on an {device}", _INTRODUCTION.rstrip(), _circumstances(rows)]
    for name, group in GROUPS.items():
        units = _units(name, [row for row in rows if row.group == name])
        if not any(row.seconds for unit in units.values() for row in unit):
            continue
        parts += [f"### {group.title} ({device})", group.about]
        parts += (_unit(name, step, unit) for step, unit in units.items())
    parts += [f"### The roofline ({device})", *fitted_rates(rows)]
    if lost := [row for row in rows if not row.seconds]:
        parts += [f"### Not measured ({device})", _not_measured(lost)]
    return "\n\n".join(parts) + "\n"


def _circumstances(rows: Sequence[Row]) -> str:
    """Where and when; once, if that is the same for all."""
    every = dict.fromkeys(
        (row.date, row.machine, row.versions, row.flags) for row in rows if row.seconds
    )
    return "\n".join(
        f"- {date}: {machine}; {versions}; `{flags}`"
        for date, machine, versions, flags in every
    )


def _units(name: str, rows: Sequence[Row]) -> Mapping[str, _Unit]:
    """The rows of a group by their units, in the order of the table.

    They have come in any order, and some of them are of an earlier table.
    """
    known = [
        (unit.step, program.name)
        for unit in GROUPS[name].units(as_it_is)
        for program in unit.programs
    ]
    order = {about: i for i, about in enumerate(known)}
    found = dict[str, list[Row]]()
    for row in sorted(
        rows, key=lambda row: order.get((row.step, row.name), len(order))
    ):
        found.setdefault(row.step, []).append(row)
    return found


def _unit(group: str, step: str, rows: _Unit) -> str:
    measured = [row for row in rows if row.seconds]
    if not measured:
        return f"**{step}**: not measured."
    columns = {**_COLUMNS, **_OF_GROUPS.get(group, {})}
    cells = [
        (_name(row), *(cell(row, rows) for cell in columns.values()))
        for row in measured
    ]
    return f"**{step}**\n\n{table(('', *columns), cells)}"


def _name(row: Row) -> str:
    return f"`{row.name}`" if "(" in row.name and "`" not in row.name else row.name


def _median(row: Row) -> float:
    return statistics.median(row.seconds)


def _time(row: Row, _: _Unit) -> str:
    return f"{milliseconds(_median(row))} ({milliseconds(min(row.seconds))})"


def _over_first(row: Row, rows: _Unit) -> str:
    return f"{_median(row) / _median(rows[0]):.2f}" if rows[0].seconds else ""


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:,.1f} MiB"


def _over_best(row: Row, rows: _Unit) -> str:
    """The time of a budget over the best of the other programs that fit into it."""
    if not row.name.startswith("Budget") or rows[0].temp is None:
        return ""
    budget = float(row.name.split(",")[0].removeprefix("Budget of ")) * rows[0].temp
    fitting = [
        _median(one)
        for one in rows
        if one.seconds and not one.name.startswith("Budget") and one.temp <= budget
    ]
    if not fitting:
        return "nothing else fits"
    return f"{_median(row) / min(fitting):.2f}, of {len(fitting)}"


def _added(row: Row, rows: _Unit) -> float | None:
    """How much longer it takes with slots on the host."""
    here = [one for one in rows if f"Offload({one.name})" == row.name and one.seconds]
    return _median(row) - _median(here[0]) if here else None


def _longer(row: Row, rows: _Unit) -> str:
    added = _added(row, rows)
    return "" if added is None else f"{1e3 * added:+,.1f} ms"


def _moved(row: Row, rows: _Unit) -> str:
    """The bytes that go to the host and back, in the time that this takes."""
    added = _median(row) if row.step == "copies" else _added(row, rows)
    if not row.host or added is None:
        return ""
    return f"{2 * row.host / added / 1e9:.1f} GB/s" if added > 0 else "no time"


def _not_measured(rows: Sequence[Row]) -> str:
    lines = (
        (GROUPS[row.group].title, row.step, _name(row), f"`{row.wrong}`")
        for row in rows
        if row.group in GROUPS
    )
    return folded(f"{len(rows)} programs", table(("", "", "", "why"), lines))


_Cell: TypeAlias = Callable[[Row, _Unit], str]
_COLUMNS: Mapping[str, _Cell] = {
    "time": _time,
    "over the first": _over_first,
    "memory": lambda row, _: _size(row.temp),
    "planned": lambda row, _: _size(row.planned),
    "allocated": lambda row, _: _size(row.peak),
    "evaluations": lambda row, _: f"{row.evaluations:,}" if row.evaluations else "",
    "difference": lambda row, _: "" if row.error is None else f"{row.error:.0e}",
    "foreseen": lambda row, _: (
        milliseconds(sum(row.foreseen.values())) if row.foreseen else ""
    ),
}
_OF_GROUPS: Mapping[str, Mapping[str, _Cell]] = {
    "regret": {"over the best that fits": _over_best},
    "offload": {
        "on the host": lambda row, _: _size(row.host or None),
        "longer than here": _longer,
        "moved in that time": _moved,
    },
}
