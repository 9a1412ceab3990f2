"""`python -m tests.errors`: notes the messages anew, and writes the page."""

import argparse
import sys

from ._messages import choose, is_among, load, save
from ._page import PAGE, is_apt, render
from ._recorder import record


def main() -> int:
    """Runs the tests; if all pass, writes messages and page, or checks the messages."""
    parser = argparse.ArgumentParser(prog="python -m tests.errors")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a message is no longer seen by the tests",
    )
    check = parser.parse_args().check
    seen, passed = record()
    if not passed:
        return 1
    if check:
        gone = [
            site
            for site, message in load().items()
            if not is_among(message, seen.get(site, set()))
        ]
        print("\n".join(f"No longer seen: the message of {site}" for site in gone))
        return int(bool(gone))
    messages = choose(seen, is_apt)
    save(messages)
    PAGE.write_text(render(messages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
