"""Looks for gradients that take more than their budget.

    python -m tests.budgets --minutes 60               # seeds one after the other
    python -m tests.budgets --minutes 5 --seed 9000    # from this seed on
    python -m tests.budgets --only 1234                # what the seed 1234 stands for

Each seed that breaks the promise is shown with the command that has it again; the first
of each kind is made smaller. It exits with 1 if there was one.
"""

import argparse
import collections
import sys
import time

import jax

from ..random_programs.judging import Finding, Skipped
from ..random_programs.shrinking import shrink
from .choice import random_case
from .judging import judge


def main() -> int:
    arguments = _arguments()
    if arguments.only is not None:
        print(random_case(arguments.only))
        return 0 if arguments.show else _one(arguments.only)
    until = time.monotonic() + 60 * arguments.minutes
    kinds: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    seed = arguments.seed
    while time.monotonic() < until:
        try:
            finding = judge(random_case(seed))
        except Skipped as skipped:
            counts[f"skipped, {skipped}"] += 1
        else:
            counts["broken" if finding else "kept"] += 1
            if finding is not None:
                print(f"python -m tests.budgets --only {seed}  # {finding.kind}")
                print(*finding.detail.splitlines()[:1], flush=True)
                if arguments.shrink and not kinds[finding.kind]:
                    _report(finding)
                kinds[finding.kind] += 1
        seed += 1
        if seed % 10 == 0:
            jax.clear_caches()
    for count in (kinds, counts):
        print(*(f"{n:6} {name}" for name, n in count.most_common()), sep="\n")
    print(f"seeds {arguments.seed} to {seed - 1}")
    return 1 if kinds else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.budgets")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", type=int, help="the case of one seed")
    parser.add_argument("--show", action="store_true", help="and do not judge it")
    parser.add_argument("--no-shrink", action="store_false", dest="shrink")
    return parser.parse_args()


def _one(seed: int) -> int:
    try:
        finding = judge(random_case(seed))
    except Skipped as skipped:
        print(f"skipped: {skipped}")
        return 0
    if finding is None:
        return 0
    print(finding.kind, finding.detail, sep="\n", flush=True)
    _report(finding)
    return 1


def _report(finding: Finding) -> None:
    smaller = shrink(finding, judge)
    print("=" * 88, smaller, "=" * 88, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
