"""`python -m tests.operations`: see `__init__.py`."""

import argparse
import collections
import os
import sys
import time

from ..conftest import QUICK_FLAGS

os.environ["XLA_FLAGS"] = f"{QUICK_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()

import jax

jax.config.update("jax_enable_x64", True)

from .cases import all_cases  # noqa: E402
from .complete import missing  # noqa: E402
from .places import PLACES  # noqa: E402
from .table import lines_of, outcomes  # noqa: E402


def main() -> int:
    known = argparse.ArgumentParser("python -m tests.operations")
    known.add_argument("--only", help="operations, with commas between them")
    known.add_argument("--place", help="places, with commas between them")
    known.add_argument("--quick", action="store_true", help="some cases of each")
    known.add_argument("--part", default="0/1", help="which part of how many")
    arguments = known.parse_args()
    cases = all_cases()
    said = [] if arguments.only else missing(cases)
    if arguments.only:
        cases = [c for c in cases if c.operation in arguments.only.split(",")]
    places = arguments.place.split(",") if arguments.place else [*PLACES]
    by_operation = collections.defaultdict(list)
    for case in cases:
        by_operation[case.operation].append(case)
    part, count = map(int, arguments.part.split("/"))
    found = []
    for name in sorted(by_operation)[part::count]:
        some = [case for case in by_operation[name] if case.is_taken]
        some = some[:: max(1, len(some) // 3)] if arguments.quick else some
        start = time.perf_counter()
        for one in outcomes(some, places):
            found.append(one)
            if one.kind in ("wrong", "error"):
                print(f"{one.kind} in {one.place}: {one.case}: {one.why}", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        jax.clear_caches()
    print(*lines_of(found, places), *said, sep="\n")
    return 1 if said or any(one.kind in ("wrong", "error") for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
