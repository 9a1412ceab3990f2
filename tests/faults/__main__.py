"""`python -m tests.faults`: plants faults, and reports those that no test finds."""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ._faults import ROOT, Fault, all_faults, explained, sample
from ._planted import Planted, named_in, planted
from ._recorder import Recorder
from ._runner import Checkout

# Tests that differentiate, batch and run loops and maps.
TESTS = (
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_*.py")),
    "tests/checkpointing",
    "tests/mapping",
    "tests/loops",
    "tests/autodiff",
    "tests/debug",
    "tests/progress",
    "tests/random_programs",
)
# Most faults are found by the first few tests that reach them.
FIRST = 12


def main() -> int:
    """Plants a sample of faults; 1 if one is neither found nor explained."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--count", type=int, default=150, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument("--shard", default="1/1", help="2/4: the second of four parts")
    parser.add_argument(
        "--record", type=Path, help="where it is noted what tests reach"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="for how long the tests of a fault may take when there is none",
    )
    parser.add_argument("--list", action="store_true", help="show the faults alone")
    parser.add_argument(
        "--planted", action="store_true", help="the fixed list, by the tests of a room"
    )
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    if options.planted:
        return _plant(planted()[part - 1 :: parts])
    reasons = explained()
    faults = sample(
        [[f for f in group if f not in reasons] for group in all_faults()],
        options.count,
        options.seed,
    )[part - 1 :: parts]
    if options.list:
        print("\n".join(map(str, faults)))
        return 0
    with tempfile.TemporaryDirectory() as home:
        checkout = Checkout(ROOT, Path(home))
        tests = _record(checkout, options.record or Path(home, "record.json"))
        survivors = [
            f for f in faults if not _is_found(checkout, tests, f, options.seconds)
        ]
    print(f"\n{len(faults) - len(survivors)} of {len(faults)} faults found")
    print("\n\n".join(fault.entry for fault in survivors))
    return int(bool(survivors))


def _plant(faults: list[Planted]) -> int:
    """Plants a list of faults; 1 if one is not found."""
    with tempfile.TemporaryDirectory() as home:
        checkout, survivors = Checkout(ROOT, Path(home)), 0
        # This also compiles what the faults do not change.
        if not checkout.run(named_in(faults)):
            print(checkout.log.read_text(), "The tests fail without any fault.")
            return 1
        for fault in faults:
            start, test = time.monotonic(), fault.found_by(checkout)
            survivors += test is None
            seconds = f"{time.monotonic() - start:.0f} s"
            print(f"{test or 'NOT FOUND'}, {seconds}: {fault}", flush=True)
    print(f"\n{len(faults) - survivors} of {len(faults)} faults found")
    return int(bool(survivors))


def _record(checkout: Checkout, path: Path) -> dict[str, Any]:
    """Which lines each test reaches; of tests that pass."""
    if not path.exists():
        plugin = Recorder(checkout.root, path)
        passed = checkout.run([*TESTS, "--maxfail=1000"], plugins=[plugin])
        print("the tests pass" if passed else "some tests fail without any fault")
    tests = json.loads(path.read_text())
    return {name: test for name, test in tests.items() if test["passed"]}


def _is_found(
    checkout: Checkout, tests: dict[str, Any], fault: Fault, most: float
) -> bool:
    """Whether one of the tests that reach a fault fails."""
    reaching = _reaching(tests, fault, most)
    start = time.monotonic()
    found = any(
        not checkout.passes_with(
            fault.file, fault.text, some, seconds=_patience(tests, some)
        )
        for some in (reaching[:FIRST], reaching[FIRST:])
        if some
    )
    verdict = "found" if found else f"NOT FOUND by {len(reaching)} tests"
    print(f"{verdict} in {time.monotonic() - start:.0f} s: {fault}", flush=True)
    return found


def _reaching(tests: dict[str, Any], fault: Fault, most: float) -> list[str]:
    """Tests that reach a fault: first those which do much of its file in little time.

    Args:
        tests: All tests.
        fault: The fault.
        most: After how many seconds there are enough of them.
    """
    first, last = fault.lines
    lines = set(range(first, last + 1))
    rates = {
        name: test["seconds"] / len(of_file)
        for name, test in tests.items()
        if (of_file := set(test["lines"].get(fault.file, ())))
        # What a class has runs when the module is imported, and in no test.
        and (lines & of_file or fault.is_of_a_class)
    }
    order = sorted(rates, key=lambda name: rates[name])
    spent = itertools.accumulate(tests[name]["seconds"] for name in order)
    return [name for name, seconds in zip(order, spent, strict=True) if seconds < most]


def _patience(tests: dict[str, Any], some: list[str]) -> float:
    """After how many seconds tests count as hanging."""
    return 120 + 10 * sum(tests[name]["seconds"] for name in some)


if __name__ == "__main__":
    sys.exit(main())
