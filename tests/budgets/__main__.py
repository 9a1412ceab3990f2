"""Looks for gradients that take more than their budget.

    python -m tests.budgets 1234                       # what the seed 1234 stands for
    python -m tests.budgets --minutes 60               # seeds one after the other
    python -m tests.budgets --minutes 5 --from 9000    # from this seed on

Each kind of finding is shown once, with its seed and made smaller. It exits with 1 if
there was one.
"""

import sys

from ..random_programs.searching import parser, search
from .choice import random_case
from .judging import judge


def main() -> int:
    arguments = parser("python -m tests.budgets").parse_args()
    return search(arguments, random_case, judge)


if __name__ == "__main__":
    sys.exit(main())
