"""`python -m tests.benchmarks`: measures every comparison, and prints it as Markdown.

With `--write docs/benchmarks.md` it writes the page of the documentation as well.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from . import _report as report
from ._comparison import Comparison
from ._machine import environment, watch
from ._results import Environment, Record, data_of, load, merged, save, with_claims
from .groups import GROUPS, Startup


def main() -> int:
    """Runs the groups asked for; with `--check`, fails if one misses its bounds."""
    options = _options()
    if not options.write:
        return _run(options)
    # Needs matplotlib: better missed now than when all is measured.
    from ._once import differing
    from ._page import write

    status = _run(options)
    write(options.write)
    for groups in load(data_of(options.write)).values():
        for line in differing(
            {name: groups[name] for name in GROUPS if name in groups}
        ):
            print(line)
    return status


def _run(options: argparse.Namespace) -> int:
    if options.render:
        return 0
    holds = True
    where = environment()
    print(report.environment(where), flush=True)
    for name in options.only:
        comparisons = _comparisons(name, options.quick)
        of_title = (one for one in comparisons if re.search(options.titles, one.title))
        record = _measure(where, of_title)
        holds = holds and all(outcome.holds for outcome in record.outcomes)
        if options.write:
            data = data_of(options.write)
            results = load(data)
            if options.claims:
                record = with_claims(results[where.place][name], record)
            save(merged(results, name, record), data)
    return int(options.check and not holds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument(
        "--only",
        type=lambda names: names.split(","),
        default=list(GROUPS),
        metavar="GROUP,...",
        help=f"groups to run, of {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="write this page, its pictures, and its figures; the figures of groups "
        "that are not run, and of other platforms, stay as they are",
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="measure nothing: write the page from the figures that there are",
    )
    parser.add_argument(
        "--claims",
        action="store_true",
        help="with --write: replace only what came of the claims, and leave the rows, "
        "whose times need a quiet machine",
    )
    parser.add_argument(
        "--titles",
        default="",
        metavar="PATTERN",
        help="with --claims: only the comparisons with such a title",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the first comparison of each group, once: to see that it runs",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a bound is missed"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in GROUPS]:
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if options.titles and not options.claims:
        parser.error("--titles needs --claims: a group is replaced as a whole")
    if options.claims and not options.write:
        parser.error("--claims needs --write, with the page that has the rows")
    if options.render and not options.write:
        parser.error("--render needs --write, with the page to be written")
    return options


def _comparisons(name: str, quick: bool) -> Iterable[Comparison | Startup]:
    comparisons = GROUPS[name].comparisons()
    return [next(iter(comparisons)).once()] if quick else comparisons


def _measure(where: Environment, comparisons: Iterable[Comparison | Startup]) -> Record:
    elsewhere = watch()
    outcomes = []
    for comparison in comparisons:
        outcomes.append(comparison.run())
        print(report.section(outcomes[-1]), flush=True)
    today = datetime.date.today().isoformat()
    return Record(where, today, elsewhere(), tuple(outcomes))


if __name__ == "__main__":
    sys.exit(main())
