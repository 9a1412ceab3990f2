"""`python -m tests.peers equinox`, `diffrax` or `jax`: their tests, on our loops.

`diffrax_adjoint` runs Diffrax's on our adjoint, and for comparison on its own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from ._run import fetch, run
from ._suites import SUITES


def main() -> int:
    """Runs a suite; fails if a test fails that is not expected to, or the reverse."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument(
        "--checkout",
        type=Path,
        metavar="DIR",
        help="where the repository is; by default it is cloned, at the version that "
        "is installed",
    )
    parser.add_argument("--only", metavar="FILE", help="run this file alone")
    options, others = parser.parse_known_args()  # the others are pytest's
    suite = SUITES[options.suite].only(options.only)
    with tempfile.TemporaryDirectory() as folder:
        checkout = options.checkout
        if checkout is None:
            checkout = Path(folder) / suite.package
            fetch(suite, checkout)
        failed = run(options.suite, suite, checkout.absolute(), others)
    print("\n".join(f"FAILED {file}" for file in failed) or "All as expected.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
