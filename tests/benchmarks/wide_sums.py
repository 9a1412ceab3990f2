"""What it costs to add up cotangents of bfloat16 in float32, and what it gains.

`python -m tests.benchmarks.wide_sums` prints the table of `docs/recipes/precision.md`:
gradients by bfloat16 weights, with sums in float32 and with `el.accumulating_in(None)`.
A loss adds up all values, so the terms of its gradient have the same sign.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

from ._measure import Case, Measurement, measure

STEPS, WIDTH = 1024, 256
NARROW = jnp.bfloat16


def row(weights: Any, x: Any, extra: Any) -> Any:
    matrix, bias = weights
    return jnp.tanh(matrix @ x + bias + extra)


def rows(transform: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of all rows, of a map over these."""
    value = lambda *args: jnp.sum(row(*args).astype(jnp.float32))
    return lambda weights, xs, extras: jnp.sum(
        transform(lambda x, extra: value(weights, x, extra))(xs, extras)
    )


def steps(schedule: Any) -> Callable[..., Any]:
    """The loss of all steps, of a scan by a schedule."""

    def loss(weights: Any, xs: Any, extras: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, total = carry
            h = row(weights, h, x[0] + x[1])
            return (h, total + jnp.sum(h.astype(jnp.float32))), None

        init = jnp.zeros(WIDTH, NARROW), jnp.float32(0)
        return el.Scan(step, schedule=schedule)(init, (xs, extras))[0][1]

    return loss


LOSSES = {
    "`Scan`, `StoreAll()`": steps(el.StoreAll()),
    "`Scan`, `Recursive(16)`": steps(el.Recursive(16)),
    "`Scan`, `Recursive(16, batch=1)`": steps(el.Recursive(16, batch=1)),
    "`Scan`, `Chunked(32, batch=32)`": steps(el.Chunked(32, batch=32)),
    "`Scan`, `Binomial(16)`": steps(el.Binomial(16)),
    "`Map`": rows(el.Map),
    "`ChunkedVmap`, 8 rows": rows(lambda f: el.ChunkedVmap(f, 8)),
    "`ChunkedVmap`, 128 rows": rows(lambda f: el.ChunkedVmap(f, 128)),
}


def arguments() -> tuple[Any, ...]:
    """Weights, rows, and a bias for each row, all of which are zero."""
    numbers = np.random.default_rng(0)
    matrix = numbers.normal(size=(WIDTH, WIDTH)) / 2 / np.sqrt(WIDTH)
    xs = numbers.normal(size=(STEPS, WIDTH))
    make = lambda x: jnp.asarray(x, NARROW)
    return (make(matrix), make(np.full(WIDTH, 0.1))), make(xs), make(np.zeros_like(xs))


@dataclasses.dataclass(frozen=True)
class Cost:
    """A gradient with wide sums and without, in this order.

    Attributes:
        name: What loop it is of.
        nbytes: What each allocates.
        errors: How far the gradient by the bias is off, relative to its norm.
        times: How long each takes, in seconds; 0 if it was not measured.
    """

    name: str
    nbytes: list[int]
    errors: list[float]
    times: list[float]

    @property
    def in_words(self) -> str:
        (wide, narrow), (error, before) = self.nbytes, self.errors
        time, plain = self.times
        a_weight = (wide - narrow) / (WIDTH * WIDTH + WIDTH)
        cells = (
            self.name,
            f"{wide / 2**10:,.0f} KiB",
            f"{a_weight:+.1f}",
            f"{time / plain:.2f}" if plain else "",
            f"{100 * error:.2g} %",
            f"{100 * before:.2g} %",
        )
        return f"| {' | '.join(cells)} |"


def costs(rounds: int = 15) -> Iterator[Cost]:
    """What each gradient takes, with wide sums and without."""
    for name, loss in LOSSES.items():
        args = arguments()
        # A bias of its own for each row has cotangents that nobody adds up.
        terms = jax.jit(jax.grad(loss, argnums=2))(*args)
        exact = np.asarray(terms, np.float64).sum(0)
        both = []
        for sums in ("float32", None):
            under = lambda sums=sums: el.accumulating_in(sums)
            both.append(Case(str(sums), jax.grad(loss), args, under=under))
        found = measure(both, rounds=rounds)
        taken = [m for m in found.values() if isinstance(m, Measurement)]
        errors = [_error(case, exact) for case in both]
        # Whatever else the machine does, it keeps a run busy no shorter than that.
        times = [float(np.min(m.busy)) if rounds else 0.0 for m in taken]
        yield Cost(name, [m.temp_bytes for m in taken], errors, times)


def _error(case: Case, exact: np.ndarray) -> float:
    with case.under():
        _, bias = jax.jit(case.fn)(*case.args)
    found = np.asarray(bias, np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


HEAD = """\
| gradient of | memory | bytes a weight | time | off by | without |
|---|--:|--:|--:|--:|--:|"""

if __name__ == "__main__":
    print(HEAD)
    for cost in costs():
        print(cost.in_words, flush=True)
