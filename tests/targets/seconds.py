"""How long it takes to plan for a GPU, beside planning for a CPU.

    python -m tests.targets.seconds                 # all steps of the benchmarks
    python -m tests.targets.seconds --only 'gru*'   # those whose names are like this

Each step is planned with a `Budget`, alone and in a batch of 1,024, for both devices,
and nothing is run. A plan for a GPU may take twice the time of one for a CPU, and ten
seconds: no kernel may be compiled that takes minutes. Times are of processors.
"""

import argparse
import fnmatch
import resource
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from ._cases import STEPS, Problem, problems_of

_LENGTH, _ROWS = 1000, 1024
_MORE, _FACTOR = 10.0, 2.0


def main() -> int:
    """Plans all that is asked for; exits with 1 if one takes too long."""
    parser = argparse.ArgumentParser(prog="python -m tests.targets.seconds")
    parser.add_argument("--kind", default="h100", metavar="DEVICE")
    parser.add_argument("--only", default="*", metavar="NAMES")
    options = parser.parse_args()
    late = 0
    for problem in problems_of(_LENGTH, STEPS):
        if not fnmatch.fnmatch(problem.name, options.only):
            continue
        for rows in (1, _ROWS):
            here, _ = _planned(problem, rows, "cpu")
            there, kernel = _planned(problem, rows, options.kind)
            is_late = there > _FACTOR * here + _MORE
            late += is_late
            said = f"{problem.name}, {rows} rows: {here:.1f} s for a CPU, {there:.1f} s"
            print(said, "LATE" if is_late else "", kernel or "", flush=True)
    return int(late > 0)


def _planned(problem: Problem, rows: int, kind: str) -> tuple[float, str | None]:
    """The seconds that a plan takes, and what it says of kernels."""
    gradient = _gradient(rows)
    with el.planning_for(kind):
        start = _seconds()
        (loop, *_) = el.plans(gradient)(*problem.types)
        return _seconds() - start, getattr(loop.plan, "kernel", None)


def _gradient(rows: int) -> Callable[..., Any]:
    schedule = el.Budget("256MiB", measure=False)

    def loss(init: Any, cell: Any, xs: Any) -> jax.Array:
        run = lambda init: el.Scan(cell, schedule=schedule)(init, xs)
        if rows > 1:
            batch = lambda x: jnp.broadcast_to(x, (rows, *x.shape))
            return _sum(jax.vmap(run)(jax.tree.map(batch, init)))
        return _sum(run(init))

    return lambda cell, init, xs: jax.grad(loss)(init, cell, xs)


def _sum(tree: Any) -> jax.Array:
    return jnp.sum(jnp.stack([(leaf**2).sum() for leaf in jax.tree.leaves(tree)]))


def _seconds() -> float:
    of = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(which)[:2]) for which in of)


if __name__ == "__main__":
    sys.exit(main())
