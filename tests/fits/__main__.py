"""Shows what gradients with one budget take, and how long.

python -m tests.fits                       # all functions, ten budgets each
python -m tests.fits --only mixer,rollout --budgets 4 --scale 0.5
python -m tests.fits --by-hand             # beside divisions of the same memory by hand
python -m tests.fits --write FILE          # the table as a page, too
"""

import argparse
import statistics
import sys
from pathlib import Path

import jax

from ._functions import NAMES, function
from ._measure import Row, against_hand, measured

_HEAD = (
    "| function | budget, of all | taken, of the budget | taken, of all "
    "| time over plain | planning over compiling | programs |\n"
    "|---|---|---|---|---|---|---|"
)

_HEAD_BY_HAND = (
    "| function | budget, of all | time over the best by hand | divisions that fit |\n"
    "|---|---|---|---|"
)


def main() -> int:
    """Prints the table; exits with 1 if a gradient takes more than its budget."""
    options = _options()
    if options.by_hand:
        return _beside_hand(options)
    lines = [_HEAD]
    print(_HEAD, flush=True)
    is_above = False
    for name in options.only:
        made = function(name, options.scale)
        rows = measured(made, options.budgets, options.rounds)
        whole = rows[0].taken
        found = [_line(made.name, row, whole) for row in rows]
        print("\n".join(found), flush=True)
        lines += found
        is_above |= any(row.budget and row.taken > row.budget for row in rows)
        if options.write:
            options.write.write_text("\n".join(lines) + "\n")
        jax.clear_caches()
    return int(is_above)


def _beside_hand(options: argparse.Namespace) -> int:
    """Prints the times of budgets over those of the best divisions by hand."""
    print(_HEAD_BY_HAND, flush=True)
    for name in options.only:
        made = function(name, options.scale)
        rows = against_hand(made, options.budgets, options.rounds)
        for row in rows:
            print(f"| {made.name} | {row.name} | {row.time:.2f} | {row.fitting} |")
        ratios = [row.time for row in rows if row.fitting]
        median = statistics.median(ratios)
        print(
            f"| {made.name} | median, worst | {median:.2f}, {max(ratios):.2f} "
            f"| of {rows[0].tried} |",
            flush=True,
        )
        jax.clear_caches()
    return 0


def _line(name: str, row: Row, whole: int) -> str:
    of_budget = "" if row.budget is None else f"{row.taken / row.budget:.3f}"
    return (
        f"| {name} | {row.name} | {of_budget} | {row.taken / whole:.2f} "
        f"| {row.time:.2f} | {row.planning:.1f} | {row.programs} |"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fits")
    several = lambda text: text.split(",")
    parser.add_argument("--only", type=several, default=NAMES, metavar="NAME,...")
    parser.add_argument("--budgets", type=int, default=10, help="of each function")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each gradient")
    parser.add_argument("--scale", type=float, default=1.0, help="of the functions")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
