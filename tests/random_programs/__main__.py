"""Looks for programs that the library gets wrong.

    python -m tests.random_programs 1234               # what the seed 1234 stands for
    python -m tests.random_programs --minutes 60       # seeds one after the other
    python -m tests.random_programs --minutes 5 --from 9000 --without ref,hessian
    python -m tests.random_programs --minutes 60 --seeing    # rows that see their batch
    python -m tests.random_programs --minutes 60 --checked   # in a checked `shard_map`
    python -m tests.random_programs --minutes 60 --foreign   # loops of JAX, rescheduled

Each kind of finding is shown once, with its seed and made smaller. It exits with 1 if
there was one.
"""

import sys

import jax

from .cases import Case
from .checked import checked_case, judge_checked
from .choice import random_case
from .foreign import rescheduled_case
from .judging import judge
from .searching import parser, search
from .seeing import judge_seeing, seeing_case

# Enough devices to split a map over.
jax.config.update("jax_num_cpu_devices", 8)


def main() -> int:
    known = parser("python -m tests.random_programs")
    known.add_argument("--without", default="", help="modes, places, rules, effects")
    known.add_argument("--seeing", action="store_true", help="rows see their batch")
    known.add_argument("--checked", action="store_true", help="in a `shard_map`")
    known.add_argument("--foreign", action="store_true", help="loops of JAX's own")
    arguments = known.parse_args()
    left_out = frozenset(arguments.without.split(","))
    make, judged = random_case, judge
    if arguments.seeing:
        make, judged = seeing_case, judge_seeing
    elif arguments.checked:
        make, judged = checked_case, judge_checked
    elif arguments.foreign:
        make = rescheduled_case

    def case_of(seed: int) -> Case:
        return make(seed, left_out)

    return search(arguments, case_of, judged)


if __name__ == "__main__":
    sys.exit(main())
