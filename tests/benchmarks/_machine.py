"""The machine that is measured on, and what else it has to do meanwhile."""

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import jax

import eqloop as el

from ._results import Environment

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "equinox",
    "diffrax",
    "powerpax",
    "brainstate",
    "netket",
    "jax-tqdm",
    "numpy",
)
_ROOT = Path(__file__).parents[2]
_MEASURED = ("eqloop", "tests/benchmarks")


def environment() -> Environment:
    """Of this process."""
    versions = {package: _version(package) for package in PACKAGES}
    there = {package: version for package, version in versions.items() if version}
    return Environment(
        platform=jax.default_backend(),
        machine=_machine(),
        python=platform.python_version(),
        packages={"eqloop": el.__version__, **there},
        commit=_commit(),
    )


def watch() -> Callable[[], float | None]:
    """Begins to watch the processors.

    Returns:
        A function that tells how many cores other programs than this one have kept busy
        since, on average; `None` where there is no `/proc/stat` to read.
    """
    start, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def elsewhere() -> float | None:
        now = _busy_seconds()
        if busy is None or now is None:
            return None
        others = (now - busy) - (_own_seconds() - own)
        return max(others, 0.0) / (time.perf_counter() - start)

    return elsewhere


def _busy_seconds() -> float | None:
    """What all cores have worked since the machine was started, taken together."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(count) for count in stat.read_text().splitlines()[0].split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return sum(os.times()[:4])


def _machine() -> str:
    device, count = jax.devices()[0], len(jax.devices())
    host = f"{_processor()}, {os.cpu_count()} cores"
    if device.platform == "cpu":
        return host
    return f"{count} x {device.device_kind}; host: {host}"


def _processor() -> str:
    """The processor's name: Linux keeps it where `platform` does not look."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The last commit to what is measured, whatever else has changed since."""
    last = _git("log", "-1", "--abbrev=12", "--format=%h", "--", *_MEASURED)
    changed = _git("status", "--porcelain", "--", *_MEASURED)
    return f"{last}-dirty" if last and changed else last or "unknown"


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ("git", *arguments), cwd=_ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return ""
    return run.stdout.strip()
