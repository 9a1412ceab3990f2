"""What was measured, as plain data: kept in a file, so that pages are made from it.

A page's results go by platform, such as `cpu` or `gpu`, and then by group. Those of
another version of JAX than the oldest one that is supported have a place of their own,
such as `cpu, JAX 0.12`. Measuring some groups anew replaces those, and leaves the
others as they were.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The oldest version of JAX that is supported.
_OLDEST = "0.10"


@dataclasses.dataclass(frozen=True)
class Row:
    """What one case took: medians over its rounds.

    Attributes:
        name: what tables call it.
        line: the line of a plot that it belongs to.
        seconds: a run.
        quartiles: of the seconds.
        compile_seconds: tracing, lowering and compiling.
        temp_bytes: what XLA allocates besides arguments and results.
        error: the greatest difference of a result from the reference, relative to the
            greatest entry of that array of the reference.
        evaluations: how often its plan evaluates a step, of a case that has one.
        kernels: how many of them the program starts for an H100, and `h100_bytes`, what
            it allocates there, if it was compiled for one.
    """

    name: str
    line: str
    seconds: float
    quartiles: tuple[float, ...]
    compile_seconds: float
    temp_bytes: int
    error: float
    evaluations: int | None = None
    kernels: int | None = None
    h100_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a claim came to: a figure, and the bound that was to hold for it.

    Attributes:
        text: what is claimed.
        figure: the median of the rounds, if it differs between them.
        at_most: the bound.
        unit: of both.
        quartiles: of the rounds, if there are several.
    """

    text: str
    figure: float
    at_most: float
    unit: str
    quartiles: tuple[float, float] | None = None

    @property
    def holds(self) -> bool:
        """Whether it stays under the bound, in at least a quarter of the rounds.

        It is missed where three of four rounds miss it: not where the rounds differ
        by more than the figure is from the bound.
        """
        least = self.quartiles[0] if self.quartiles else self.figure
        return least <= self.at_most


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a comparison measured.

    Attributes:
        title: its heading.
        size: where it stands on the horizontal axis, if its group is drawn.
        rounds: how many times every case was run.
        tolerance: results differ from the reference by at most this.
        rows: what was measured.
        skipped: cases that could not be run, each with the package it lacked.
        verdicts: what the claims came to.
        claimed: when, and at which commit, the claims were measured anew, if they were
            without the rows.
    """

    title: str
    size: int | None
    rounds: int
    tolerance: float
    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    claimed: str | None = None

    @property
    def disagreeing(self) -> list[str]:
        """The cases whose results are not the reference's."""
        return [row.name for row in self.rows if row.error > self.tolerance]

    @property
    def holds(self) -> bool:
        """Whether all results agree and every claim holds."""
        return not self.disagreeing and all(v.holds for v in self.verdicts)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Without which figures mean nothing.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        machine: the processors, in words.
        python: its version.
        packages: their versions; what is not installed is not there.
        commit: the last one to the code that was measured; `-dirty` if it was changed
            since.
    """

    platform: str
    machine: str
    python: str
    packages: Mapping[str, str]
    commit: str

    @property
    def place(self) -> str:
        """What its results go by."""
        version = ".".join(self.packages.get("jax", _OLDEST).split(".")[:2])
        is_plain = version == _OLDEST or self.platform != "cpu"
        return self.platform if is_plain else f"{self.platform}, JAX {version}"


@dataclasses.dataclass(frozen=True)
class Record:
    """A group's comparisons, and the circumstances.

    Attributes:
        environment: where it was measured.
        date: when.
        busy: how many cores other programs kept busy meanwhile; `None` if unknown.
        outcomes: what the comparisons measured.
    """

    environment: Environment
    date: str
    busy: float | None
    outcomes: tuple[Outcome, ...]


Results = Mapping[str, Mapping[str, Record]]


def version_of(groups: Mapping[str, Record]) -> str:
    """The version of JAX of what was measured in one place, without its last number."""
    (version, *_) = {
        record.environment.packages.get("jax", _OLDEST) for record in groups.values()
    } or {_OLDEST}
    return ".".join(version.split(".")[:2])


def places(results: Results, platform: str) -> list[str]:
    """The places of a platform, that of the newest version of JAX first."""
    found = [place for place in results if place.split(", ")[0] == platform]
    number = lambda place: [int(n) for n in version_of(results[place]).split(".")]
    return sorted(found, key=number, reverse=True)


def data_of(page: Path) -> Path:
    """Where the results are that a page is made from: beside it."""
    return page.with_suffix(".json")


def merged(results: Results, group: str, record: Record) -> Results:
    """The results with one group measured anew."""
    place = record.environment.place
    return {**results, place: {**results.get(place, {}), group: record}}


def with_claims(record: Record, anew: Record) -> Record:
    """A group with the claims, and not the rows, of another measurement of it.

    Those of peers that were not there this time are left as they were.
    """
    found = {outcome.title: outcome for outcome in anew.outcomes}
    when = f"{anew.date}, commit `{anew.environment.commit}`"
    outcomes = list[Outcome]()
    for old in record.outcomes:
        if (new := found.get(old.title)) is None:
            outcomes.append(old)
            continue
        missing = [name for name, _ in new.skipped]
        left = (v for v in old.verdicts if any(name in v.text for name in missing))
        verdicts = (*new.verdicts, *left)
        outcomes.append(dataclasses.replace(old, verdicts=verdicts, claimed=when))
    return dataclasses.replace(record, outcomes=tuple(outcomes))


def load(path: Path) -> Results:
    """What `save` wrote; nothing, if there is no such file yet."""
    if not path.exists():
        return {}
    return {
        place: {name: _record(record) for name, record in groups.items()}
        for place, groups in json.loads(path.read_text()).items()
    }


def save(results: Results, path: Path) -> None:
    """Writes the results as JSON."""
    data = {
        place: {name: dataclasses.asdict(record) for name, record in groups.items()}
        for place, groups in results.items()
    }
    for groups in data.values():
        for record in groups.values():
            for outcome in record["outcomes"]:
                if outcome["claimed"] is None:
                    del outcome["claimed"]
                for name in ("rows", "verdicts"):
                    outcome[name] = tuple(map(_without_none, outcome[name]))
    path.write_text(json.dumps(_rounded(data), indent=1) + "\n")


def _without_none(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Most rows have no plan, and are compiled for no other device, say."""
    return {name: value for name, value in row.items() if value is not None}


def _record(data: dict[str, Any]) -> Record:
    return Record(
        environment=Environment(**data["environment"]),
        date=data["date"],
        busy=data["busy"],
        outcomes=tuple(map(_outcome, data["outcomes"])),
    )


def _outcome(data: dict[str, Any]) -> Outcome:
    return Outcome(
        **data
        | {
            "rows": tuple(
                Row(**row | {"quartiles": tuple(row["quartiles"])})
                for row in data["rows"]
            ),
            "skipped": tuple(map(tuple, data["skipped"])),
            "verdicts": tuple(map(_verdict, data["verdicts"])),
        }
    )


def _verdict(data: dict[str, Any]) -> Verdict:
    quartiles = data.get("quartiles")
    return Verdict(**data | {"quartiles": quartiles and tuple(quartiles)})


def _rounded(data: Any) -> Any:
    """Five digits are more than a measurement has."""
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return [_rounded(value) for value in data]
    return float(f"{data:.5g}") if isinstance(data, float) else data
