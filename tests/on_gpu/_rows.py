"""What was measured, in a file that is whole at any moment."""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of a program.

    Attributes:
        device: What it is for, as JAX calls it.
        group: The group that it belongs to.
        step: The unit that it was run in, in turn with others.
        name: Its name there.
        seconds: How long each of its runs took.
        plan_seconds: How long it took to trace and to plan it.
        compile_seconds: How long it took to compile it.
        temp: The bytes that XLA gives it besides inputs and outputs.
        host: The same on the host.
        planned: The bytes that its plans have foreseen.
        peak: The bytes that the allocator of the device has given it, outputs and what
            it wastes among them, if they were more than those of each program that was
            run before it in its process.
        evaluations: How often the step is evaluated, of loops with plans.
        error: The greatest difference from the first program of the unit, relative to
            the greatest entry of an array.
        kernels: How many kernels and copies it starts, if its loops have known lengths.
        foreseen: The seconds that the roofline foresees, by its part: starting kernels,
            moving bytes, computing.
        wrong: Why it was not measured, or not to the end.
        versions: Of JAX and others, and the commit.
        machine: The processor beside the device.
        flags: Those of XLA.
        date: When it was measured.
    """

    device: str
    group: str
    step: str
    name: str
    seconds: tuple[float, ...] = ()
    plan_seconds: float | None = None
    compile_seconds: float | None = None
    temp: int | None = None
    host: int | None = None
    planned: int | None = None
    peak: int | None = None
    evaluations: int | None = None
    error: float | None = None
    kernels: int | None = None
    foreseen: Mapping[str, float] = dataclasses.field(default_factory=dict)
    wrong: str | None = None
    versions: str = ""
    machine: str = ""
    flags: str = ""
    date: str = ""

    @property
    def key(self) -> "Key":
        """Of rows with the same, the last one counts."""
        return self.device, self.group, self.step, self.name

    def blank(self, group: str, step: str, name: str) -> "Row":
        """A row of another program, of the same device and day."""
        return Row(
            self.device,
            group,
            step,
            name,
            versions=self.versions,
            machine=self.machine,
            flags=self.flags,
            date=self.date,
        )


Key: TypeAlias = tuple[str, str, str, str]
Rows: TypeAlias = Mapping[Key, Row]


def today() -> str:
    """The date, as rows have it."""
    return datetime.date.today().isoformat()


def load(file: Path) -> dict[Key, Row]:
    """The rows of a file, if there is one."""
    known = json.loads(file.read_text()) if file.exists() else []
    rows = (Row(**{**one, "seconds": tuple(one["seconds"])}) for one in known)
    return {row.key: row for row in rows}


def merged(rows: Rows, new: Iterable[Row]) -> dict[Key, Row]:
    """The rows with newer ones; what was measured once is not lost to a failure."""
    found = dict(rows)
    for row in new:
        known = found.get(row.key)
        if row.seconds or known is None or not known.seconds:
            found[row.key] = row
    return found


def save(rows: Rows, file: Path) -> None:
    """Writes the rows aside, and renames that: no moment has half of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # What was not found out is left out.
    fields: list[dict[str, Any]] = [
        {name: value for name, value in dataclasses.asdict(row).items() if value}
        | {"seconds": row.seconds, "error": row.error}
        for row in rows.values()
    ]
    lines = ",\n".join(json.dumps(one) for one in fields)
    aside = file.with_name(f"{file.name}.part")
    aside.write_text(f"[\n{lines}\n]\n" if fields else "[]\n")
    os.replace(aside, file)
