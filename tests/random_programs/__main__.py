"""Looks for programs that the library gets wrong.

    python -m tests.random_programs 1234               # what the seed 1234 stands for
    python -m tests.random_programs --minutes 60       # seeds one after the other
    python -m tests.random_programs --minutes 5 --from 9000 --without ref,hessian

Each kind of finding is shown once, with its seed and made smaller. It exits with 1 if
there was one.
"""

import argparse
import collections
import sys
import time

import jax

from .choice import random_case
from .judging import Finding, Skipped, judge
from .shrinking import shrink


def main() -> int:
    arguments = _arguments()
    left_out = frozenset(arguments.without.split(","))
    if arguments.seed is not None:
        return _one(arguments.seed, left_out, arguments.show)
    until = time.monotonic() + 60 * arguments.minutes
    kinds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    seed = arguments.start
    while time.monotonic() < until:
        try:
            finding = judge(random_case(seed, left_out))
        except Skipped as skipped:
            counts[f"skipped, {skipped}"] += 1
        else:
            counts["wrong" if finding else "right"] += 1
            if finding and not kinds[finding.kind]:
                _report(finding, arguments.shrink)
            if finding:
                kinds[finding.kind] += 1
                print("seed", seed, finding.kind, flush=True)
        seed += 1
        if seed % 25 == 0:
            jax.clear_caches()
    for count in (kinds, counts):
        print(*(f"{n:6} {name}" for name, n in count.most_common()), sep="\n")
    print(f"seeds {arguments.start} to {seed - 1}")
    return 1 if kinds else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs")
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--from", type=int, default=0, dest="start")
    parser.add_argument("--without", default="", help="modes, places, rules, effects")
    parser.add_argument("--no-shrink", action="store_false", dest="shrink")
    parser.add_argument("--show", action="store_true", help="the case of a seed only")
    return parser.parse_args()


def _one(seed: int, left_out: frozenset[str], only_show: bool) -> int:
    case = random_case(seed, left_out)
    print(case)
    if only_show:
        return 0
    finding = judge(case)
    if finding is None:
        return 0
    _report(finding, True)
    return 1


def _report(finding: Finding, is_shrunk: bool) -> None:
    smaller = shrink(finding) if is_shrunk else finding
    print("=" * 88, finding.kind, smaller, "=" * 88, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
