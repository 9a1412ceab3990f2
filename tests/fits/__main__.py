"""Shows what gradients with one budget take, and how long.

python -m tests.fits                       # all functions, ten budgets each
python -m tests.fits --only mixer,rollout --budgets 4 --scale 0.5
python -m tests.fits --by-hand             # beside divisions by hand
python -m tests.fits --target h100         # by the compiler of another device
python -m tests.fits --scale 0.5 --write   # and keeps them for the guide's table
python -m tests.fits --model --write       # that of a language model on a GPU
python -m tests.fits --rows --write        # that of some rows at a time
"""

import argparse
import statistics
import sys

import jax

from ._functions import NAMES, function
from ._measure import Row, against_hand, measured, on_target
from ._page import model_rows, note, of_rows
from ._rows import rows_of_losses

_HEAD = (
    "| function | budget, of all | taken, of the budget | taken, of all "
    "| time over plain | planning over compiling | programs |\n"
    "|---|---|---|---|---|---|---|"
)

_HEAD_BY_HAND = (
    "| function | budget, of all | time over the best by hand | divisions that fit |\n"
    "|---|---|---|---|"
)

_HEAD_ON_TARGET = (
    "| function | plain, bytes | budget, of all | taken, of the budget |\n"
    "|---|---|---|---|"
)


def main() -> int:
    """Prints the table; exits with 1 if a gradient takes more than its budget."""
    options = _options()
    if options.target:
        return _on_target(options)
    if options.model:
        return _of_model(options)
    if options.rows:
        return _of_rows(options)
    if options.by_hand:
        return _beside_hand(options)
    print(_HEAD, flush=True)
    is_above = False
    for name in options.only:
        made = function(name, options.scale)
        rows = measured(made, options.budgets, options.rounds)
        whole = rows[0].taken
        found = [_line(made.name, row, whole) for row in rows]
        print("\n".join(found), flush=True)
        is_above |= any(row.budget and row.taken > row.budget for row in rows)
        if options.write:
            note(functions={made.name: of_rows(rows)})
        jax.clear_caches()
    return int(is_above)


def _of_model(options: argparse.Namespace) -> int:
    """Prints what a language model takes on a GPU, by its compiler."""
    for name, found in model_rows():
        print(name, found, flush=True)
        if options.write:
            note(model={name: found})
        jax.clear_caches()
    return 0


def _of_rows(options: argparse.Namespace) -> int:
    """Prints what losses take by some rows at a time."""
    for name, rows in rows_of_losses():
        print(name, *rows, sep="\n    ", flush=True)
        if options.write:
            note(rows={name: rows})
        jax.clear_caches()
    return 0


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


def _on_target(options: argparse.Namespace) -> int:
    """Prints what budgets take by the compiler of a device that need not be here."""
    print(_HEAD_ON_TARGET, flush=True)
    is_above = False
    for name in options.only:
        made = function(name, options.scale)
        count = options.budgets
        shares = [0.1 + 0.8 * i / max(count - 1, 1) for i in range(count)]
        whole, rows = on_target(made, options.target, shares)
        for share, row in zip(shares, rows, strict=True):
            said = f"refused: {(row.least or 0) / whole:.2f} is the least"
            if row.taken is not None:
                said = f"{row.taken / row.budget:.3f}"
                is_above |= row.taken > row.budget
            print(f"| {made.name} | {whole} | {share:.2f} | {said} |", flush=True)
        jax.clear_caches()
    return int(is_above)


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
    parser.add_argument("--target", metavar="NAME", help="such as h100 or v5e")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--rows", action="store_true", help="beside rows by hand")
    parser.add_argument("--model", action="store_true", help="GPT-2 on an H100")
    parser.add_argument("--write", action="store_true", help="the guide's tables")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
