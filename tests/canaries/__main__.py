"""Prints a table of what is so with the versions that are installed.

    python -m tests.canaries            # these versions
    python -m tests.canaries --each     # each jaxlib that `pyproject.toml` allows

It exits with 1 if anything is not as it should be.
"""

import argparse
import sys
import time

import jax
import jaxlib.version

from . import CANARIES


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.canaries")
    parser.add_argument("--each", action="store_true", help="install each jaxlib")
    if parser.parse_args().each:
        # Needs what an environment of the library alone does not have.
        from .each import run_each

        return run_each()

    versions = f"JAX {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    print(f"{versions}, {jax.default_backend()}", flush=True)
    failed = 0
    for canary in CANARIES:
        start = time.perf_counter()
        wrong = list(canary.look())
        seconds = time.perf_counter() - start
        state = "ok" if not wrong else "known" if canary.is_known else "WRONG"
        failed += state == "WRONG"
        print(f"{state:5} {seconds:5.1f} s  {canary.name} ({canary.report})")
        for line in wrong:
            print(f"        {line[:200]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
