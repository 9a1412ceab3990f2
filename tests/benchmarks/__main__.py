"""`python -m tests.benchmarks`: prints every comparison as Markdown."""

import argparse
import sys

from ._report import heading, section
from .groups import GROUPS


def main() -> int:
    """Runs the groups asked for; with `--check`, fails if one misses its bounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=list(GROUPS),
        metavar="GROUP,...",
        help=f"groups to run, of {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is missed"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    print(heading(), flush=True)
    holds = True
    for name in options.only:
        for comparison in GROUPS[name]():
            outcome = comparison.run()
            holds = holds and outcome.holds
            print(section(outcome), flush=True)
    return int(options.check and not holds)


if __name__ == "__main__":
    sys.exit(main())
