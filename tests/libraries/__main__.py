"""`python -m tests.libraries`: see `tests/libraries/__init__.py`."""

import argparse
import fnmatch
import logging
import sys
from pathlib import Path

import jax

from ._cases import CASES
from ._judging import Found, judged
from ._page import table, with_rows


def main() -> int:
    """Measures what is asked for; exits with 1 if something is wrong."""
    options = _options()
    logging.getLogger("absl").setLevel(logging.ERROR)
    found, wrong = dict[str, Found](), list[str]()
    for case in CASES:
        if not fnmatch.fnmatch(case.name, options.only):
            continue
        if case.missing:
            print(f"{case.name}: without {', '.join(case.missing)}", file=sys.stderr)
            continue
        found[case.name] = judged(case)
        said = "; ".join(found[case.name].wrong)
        wrong += [f"{case.name}: {said}"] * bool(said)
        print(f"{case.name}: {said or 'as asked for'}", file=sys.stderr, flush=True)
        if options.write:
            text = options.write.read_text()
            options.write.write_text(with_rows(text, found))
        jax.clear_caches()
    print("\n".join([table(found), "", *wrong]))
    return int(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.libraries")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of names")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="put the rows into its table, too"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
