"""The commands that look for cases which the library gets wrong, seed by seed."""

import argparse
import collections
import sys
import time
from collections.abc import Callable

import jax

from .cases import Case
from .judging import Finding, Skipped
from .shrinking import Judge, shrink

# Programs that are compiled pile up. Some of them are shared, so not after each seed.
_CLEARED_EVERY = 25


def search(
    arguments: argparse.Namespace, random_case: Callable[[int], Case], judge: Judge
) -> int:
    """Judges the case of one seed, or those of many; 1 if there is a finding."""
    if arguments.seed is not None:
        return _one(random_case(arguments.seed), judge, arguments.show)
    until = time.monotonic() + 60 * arguments.minutes
    kinds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    seed = arguments.start
    while time.monotonic() < until:
        # XLA can end the process; then this is the last line.
        print("seed", seed, end="\r", file=sys.stderr, flush=True)
        try:
            finding = judge(random_case(seed))
        except Skipped as skipped:
            counts[f"skipped, {skipped}"] += 1
        else:
            counts["wrong" if finding else "right"] += 1
            if finding is not None:
                if not kinds[finding.kind]:
                    _report(shrink(finding, judge) if arguments.shrink else finding)
                kinds[finding.kind] += 1
                first = finding.detail.partition("\n")[0]
                print("seed", seed, finding.kind, first, flush=True)
        seed += 1
        if seed % _CLEARED_EVERY == 0:
            jax.clear_caches()
    for count in (kinds, counts):
        print(*(f"{n:6} {name}" for name, n in count.most_common()), sep="\n")
    print(f"seeds {arguments.start} to {seed - 1}")
    return 1 if kinds else 0


def parser(command: str) -> argparse.ArgumentParser:
    """What all of these commands can be told."""
    made = argparse.ArgumentParser(prog=command)
    made.add_argument("seed", type=int, nargs="?", help="the case of this one only")
    made.add_argument("--minutes", type=float, default=1.0)
    made.add_argument("--from", type=int, default=0, dest="start", help="first seed")
    made.add_argument("--no-shrink", action="store_false", dest="shrink")
    made.add_argument("--show", action="store_true", help="do not judge the case")
    return made


def _one(case: Case, judge: Judge, only_show: bool) -> int:
    print(case)
    if only_show:
        return 0
    try:
        finding = judge(case)
    except Skipped as skipped:
        print(f"skipped: {skipped}")
        return 0
    if finding is None:
        return 0
    _report(shrink(finding, judge))
    return 1


def _report(finding: Finding) -> None:
    print("=" * 88, finding, "=" * 88, sep="\n", flush=True)
