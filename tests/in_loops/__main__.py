"""`python -m tests.in_loops`: see `__init__.py`."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el

from .operations import OPERATIONS, Operation
from .reasons import REASONS

_ROWS, _MOST = 16, 1.5


def _reduced(f: Callable[..., Any]) -> Callable[..., Any]:
    """What a loop may carry of the results: each number of them counts."""
    total = lambda x: jnp.sum(x) if jnp.issubdtype(x.dtype, jnp.inexact) else 0.0
    return lambda *args: sum(map(total, jax.tree.leaves(f(*args))))


def _programs(f: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    one = jax.jit(_reduced(f))

    def outside(xs: Any, *others: Any) -> Any:
        return [one(x, *others) for x in xs]

    def within(scan: Callable[..., Any]) -> Callable[..., Any]:
        def run(xs: Any, *others: Any) -> Any:
            body = lambda total, x: (total + _reduced(f)(x, *others), None)
            return scan(body, jnp.float32(0), jnp.stack(xs))[0]

        return jax.jit(run)

    ours = lambda f, init, xs: el.Scan(f, schedule=el.Recursive())(init, xs)
    return dict(outside=outside, scan=within(lax.scan), ours=within(ours))


def _seconds(programs: dict[str, Callable[..., Any]], args: Any, rounds: int) -> Any:
    for run in programs.values():
        jax.block_until_ready(run(*args))
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, run in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _ways(operation: Operation) -> dict[str, Callable[..., Any]]:
    """The operation, and its gradient by all that it is given."""
    every = tuple(range(1 + len(operation.others)))
    return dict(value=operation.run, gradient=jax.grad(_squares(operation.run), every))


def _squares(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jnp.sum(jnp.square(f(*args)))


def _inputs(operation: Operation) -> Sequence[Any]:
    keys = jax.random.split(jax.random.key(0), _ROWS + len(operation.others))
    shapes = [operation.shape] * _ROWS + [*operation.others]
    made = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    return made[:_ROWS], *made[_ROWS:]


def main() -> int:
    known = argparse.ArgumentParser("python -m tests.in_loops")
    known.add_argument("--only", default="", help="operations with this in their name")
    known.add_argument("--rounds", type=int, default=7)
    options = known.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print("| operation | | outside | `lax.scan` | ours | |\n|---|---|--:|--:|--:|---|")
    missed = list[str]()
    for name, operation in OPERATIONS.items():
        if options.only not in name:
            continue
        for way, run in _ways(operation).items():
            best = _seconds(_programs(run), _inputs(operation), options.rounds)
            plain = best["outside"] / _ROWS
            scan, ours = (best[kind] / best["outside"] for kind in ("scan", "ours"))
            reason = REASONS.get((name, way), REASONS.get(name, ""))
            is_slow = ours > _MOST
            missed += [f"{name}, {way}"] if is_slow and not reason else []
            cells = f"{1e6 * plain:.0f} us | {scan:.2f} | {ours:.2f}"
            why = reason if is_slow else ""
            print(f"| {name} | {way} | {cells} | {why} |", flush=True)
        jax.clear_caches()
    for line in missed:
        print(f"{line}: slower in a loop, and `reasons.py` does not say why")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
