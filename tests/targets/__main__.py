"""`python -m tests.targets`: see `tests/targets/__init__.py`."""

import argparse
import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

import eqloop as el

from . import cells
from ._cases import GROUPS, Case
from ._page import data_of, load, save, write
from ._runs import run_all
from ._verdicts import Found, judged

# For each kind of device so many steps that not everything fits into what is close to
# its cores: a TPU has 128 MiB there, which XLA does not count.
KINDS = {"h100": 1000, "v5e": 200_000, "v6e": 200_000}
# Of a TPU that differs little from another one, this is enough.
IN_PART = {"v6e": ("steps",)}


def main() -> int:
    """Compiles what is asked for; exits with 1 if something is wrong."""
    options = _options()
    if options.only == ["fused"]:
        cells.main(options.match, options.write)
        return 0
    page = options.write or options.render
    found = load(data_of(page)) if page else {}
    count = 0
    for key, one in _found(options, found):
        found[key] = one
        count += bool(one.wrong)
        print(_line(key, one), flush=True)
        if page:
            save(found, data_of(page))
    if page:
        save(_in_order(found, options), data_of(page))
        write(page)
    return int(count > 0)


def _in_order(
    found: Mapping[str, Found], options: argparse.Namespace
) -> Mapping[str, Found]:
    """As the cases are listed: processes side by side find them in any order."""
    kinds = [_here(options.run)] if options.run else options.kinds
    asked = [
        f"{kind} | {group} | {case.name}"
        for kind, group, case in _asked_for(options, kinds)
    ]
    others = [key for key in found if key not in asked]
    return {key: found[key] for key in [*others, *asked] if key in found}


def _here(platform: str) -> str:
    """What the page calls a device that is here."""
    return f"{jax.devices(platform)[0].device_kind}, JAX {jax.__version__}"


def _found(
    options: argparse.Namespace, known: Mapping[str, Found]
) -> Iterator[tuple[str, Found]]:
    """What is found of each case, as soon as it is known."""
    is_left = lambda key: options.again or key not in known
    if options.run:
        name = _here(options.run)
        asked = [
            (group, case.name)
            for _, group, case in _asked_for(options, ["here"])
            if is_left(f"{name} | {group} | {case.name}")
        ]
        settings = options.run, options.length, asked, options.workers, options.within
        for (group, case), one in run_all(*settings):
            yield f"{name} | {group} | {case}", one
        return
    for kind, group, case in _asked_for(options, options.kinds):
        key = f"{kind} | {group} | {case.name}"
        if is_left(key):
            with el.planning_for(kind):
                yield key, judged(case)[0]
            jax.clear_caches()


def _asked_for(
    options: argparse.Namespace, kinds: Sequence[str]
) -> Iterator[tuple[str, str, Case]]:
    if options.render:
        return
    for kind in kinds:
        for group in options.only:
            if group not in IN_PART.get(kind, GROUPS):
                continue
            for case in GROUPS[group](KINDS.get(kind, options.length)):
                if fnmatch.fnmatch(case.name, options.match):
                    yield kind, group, case


def _line(key: str, found: Found) -> str:
    kernels = "" if found.kernels is None else f", {found.kernels:.1f} kernels a step"
    ran = "" if found.error is None else f", {found.error:.1e} off"
    size = f"{found.temp:,} bytes, {found.host:,} on the host{kernels}{ran}"
    return "\n    ".join([f"{key}: {size}", *found.wrong])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.targets")
    several = lambda text: text.split(",")
    parser.add_argument(
        "--kinds", type=several, default=list(KINDS), metavar="KIND,..."
    )
    parser.add_argument(
        "--only", type=several, default=list(GROUPS), metavar="GROUP,..."
    )
    parser.add_argument("--match", default="*", metavar="PATTERN", help="of names")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write it as well")
    parser.add_argument("--render", type=Path, metavar="PAGE", help="only write it")
    parser.add_argument(
        "--run", metavar="PLATFORM", help="on a device that is here, and run it as well"
    )
    parser.add_argument("--length", type=int, default=1000, help="of what is run")
    parser.add_argument("--workers", type=int, default=2, help="that compile to run")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds to begin them in"
    )
    parser.add_argument("--again", action="store_true", help="what is known, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
