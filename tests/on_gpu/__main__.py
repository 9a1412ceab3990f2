"""`python -m tests.on_gpu`: see `tests/on_gpu/__init__.py`.

What needs JAX or eqloop is imported where it is used: first it is found.
"""

import argparse
import contextlib
import fnmatch
import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import _packages
from ._rows import load, merged, save

_START = time.monotonic()
_ROOT = Path(__file__).parents[2]
_DOCS = _ROOT / "docs"

# XLA is not to try kernels, which takes minutes for large products: not those that it
# writes itself by Triton, nor those of libraries.
_FLAGS = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"
# For programs on the processor that are run on next to nothing.
_QUICK_FLAGS = "--xla_backend_optimization_level=0"

_PLUGINS = "jax-cuda12-plugin", "jax-cuda13-plugin"


def _environment(flags: str = _FLAGS, **others: str) -> dict[str, str]:
    """What processes find there."""
    return {
        "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip(),
        # They share the device.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **others,
    }


_ON_GPU = _environment(
    JAX_PLATFORMS="cuda,cpu",
    JAX_COMPILATION_CACHE_DIR=str(_ROOT / "build" / "on_gpu_cache"),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.2",
)
_DRY = _environment(JAX_PLATFORMS="cpu")
_HERE = _environment(_QUICK_FLAGS, JAX_PLATFORMS="cpu")

# What is left of the minutes when all others have ended: to write, and to leave.
_LAST_SECONDS = 5.0
# The time that a unit may measure.
_MOST_OF_A_UNIT = 90.0


def main() -> int:
    """Does what is asked for; fails if nothing came of it."""
    options = _options()
    if options.prepare:
        _packages.prepare(options.packages)
        return 0
    _packages.find(options.packages)
    if options.write:
        from ..targets._page import write

        rows = merged(load(_DOCS / "gpu.json"), load(options.write).values())
        save(rows, _DOCS / "gpu.json")
        write(_DOCS / "on_a_gpu_and_a_tpu.md")
        return 0
    return _run(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu")
    several = lambda text: text.split(",")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all")
    parser.add_argument(
        "--only", type=several, metavar="GROUP,...", help="groups to run"
    )
    parser.add_argument("--match", default="*", metavar="PATTERN", help="of steps")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where `gpu.json` is; by default docs",
    )
    parser.add_argument(
        "--dry", action="store_true", help="compile for an H100 that is not here"
    )
    parser.add_argument(
        "--here", action="store_true", help="tiny problems on the CPU that is here"
    )
    parser.add_argument("--workers", type=int, help="how many prepare side by side")
    parser.add_argument("--prepare", action="store_true", help="fill the next folder")
    parser.add_argument(
        "--packages",
        type=Path,
        metavar="FOLDER",
        default=_packages.FOLDER,
        help="where those are that the machine lacks; by default build/on_gpu",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=_DOCS / "gpu.json",
        metavar="FILE",
        help="only write the page, with the rows of such a file added",
    )
    return parser.parse_args()


def _run(options: argparse.Namespace) -> int:
    # This process takes nothing of the device, whatever is imported.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from ._found import Found
    from ._groups import GROUPS, as_it_is, tiny
    from ._processes import Processes, Task
    from ._turns import RUNS
    from ._unit import Mode, work

    if unknown := set(options.only or ()) - set(GROUPS):
        raise SystemExit(
            f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}"
        )
    print(f"Python {sys.version.split()[0]}, {', '.join(_versions())}", flush=True)
    cores = os.cpu_count() or 1
    if options.dry:
        mode, workers, environment = Mode("gpu", as_it_is, "h100"), cores, _DRY
    elif options.here:
        mode, workers, environment = Mode("cpu", tiny), cores, _HERE
    else:
        # Each compiles with two threads.
        mode, workers, environment = Mode("gpu", as_it_is), max(cores // 2, 1), _ON_GPU
    os.environ.update(environment)
    is_measured = environment is _ON_GPU
    folder = options.out or (_DOCS if is_measured else None)
    end = float("inf") if options.dry else _START + 60 * options.minutes - _LAST_SECONDS
    tasks = [
        Task(name, unit.step, 60 * group.minutes / 9 * options.minutes)
        for name, group in GROUPS.items()
        for unit in group.units(mode.size)
        if not options.only or name in options.only
        if fnmatch.fnmatch(unit.step, options.match)
    ]
    processes = Processes(
        functools.partial(work, mode),
        workers=options.workers or workers,
        end=end,
        limit=_MOST_OF_A_UNIT,
    )
    found = Found(mode.size, folder and folder / "gpu.json", _START)
    for task, said in processes.run(tasks):
        found.add(task, said)
    return found.summary(RUNS)


def _versions() -> Iterator[str]:
    for name in ("jax", "jaxlib", *_PLUGINS, "equinox", "jaxtyping", "beartype"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


if __name__ == "__main__":
    sys.exit(main())
