"""Looks for gradients that take more than their budget.

    python -m tests.budgets 1234                       # what the seed 1234 stands for
    python -m tests.budgets --minutes 60               # seeds one after the other
    python -m tests.budgets --minutes 5 --from 9000    # from this seed on
    python -m tests.budgets --minutes 60 --whole       # whole functions

Each kind of finding is shown once, with its seed and made smaller. It exits with 1 if
there was one.
"""

import sys

import jax

from ..random_programs.searching import parser, search
from .choice import random_case
from .judging import judge
from .whole import random_whole

# Enough devices to split a batch over.
jax.config.update("jax_num_cpu_devices", 2)


def main() -> int:
    known = parser("python -m tests.budgets")
    known.add_argument("--whole", action="store_true", help="by `Reschedule`, `Fit`")
    arguments = known.parse_args()
    return search(arguments, random_whole if arguments.whole else random_case, judge)


if __name__ == "__main__":
    sys.exit(main())
