"""Comparisons as Markdown."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from ._comparison import Outcome, Verdict
from ._measure import Measurement, Skipped

PACKAGES = ("jax", "jaxlib", "equinox", "eqloop", "powerpax", "brainstate", "netket")


def heading() -> str:
    """The machine, the versions and the date: without them figures mean nothing."""
    device = jax.devices()[0]
    return "\n".join(
        (
            "# Benchmarks",
            "",
            f"- {datetime.date.today().isoformat()}",
            f"- {device.platform}: {_processor()}, {os.cpu_count()} cores; "
            f"{len(jax.devices())} x {device.device_kind}",
            f"- Python {platform.python_version()}; "
            + ", ".join(_version(package) for package in PACKAGES),
            "",
        )
    )


def section(outcome: Outcome) -> str:
    """One comparison: a table of its rows, then one of its claims."""
    rows = _table(
        ("", "time", "temporary memory", "trace and compile", "difference"),
        [(name, *_cells(row)) for name, row in outcome.rows.items()],
    )
    claims = _table(
        ("claim", "measured", "at most", ""),
        [_claim_cells(verdict) for verdict in outcome.verdicts],
    )
    parts = [f"## {outcome.comparison.title}", rows]
    if outcome.verdicts:
        parts.append(claims)
    if outcome.disagreeing:
        names = ", ".join(outcome.disagreeing)
        parts.append(f"**These do not compute what the first row does: {names}.**")
    return "\n\n".join(parts) + "\n"


def _cells(row: Measurement | Skipped) -> tuple[str, ...]:
    if isinstance(row, Skipped):
        return (f"skipped: no {row.requires}, see the extra `bench`", "", "", "")
    return (
        f"{np.median(row.seconds) * 1e3:.2f} ms",
        _megabytes(row.temp_bytes),
        f"{np.median(row.compile_seconds):.2f} s",
        f"{row.error:.1e}",
    )


def _claim_cells(verdict: Verdict) -> tuple[str, ...]:
    claim = verdict.claim
    return (
        claim.text,
        f"{verdict.figure:.3g}{claim.unit}",
        f"{claim.at_most:.3g}{claim.unit}",
        "holds" if verdict.holds else "**misses**",
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f} MB"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


def _processor() -> str:
    """The processor's name: Linux keeps it where `platform` does not look."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
