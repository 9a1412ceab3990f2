"""Measures what single operations take in a loop.

`python -m tests.benchmarks.calibrate` prints those fields of `Rates`, which are in
`eqloop.checkpointing.planning._work`, that can be measured one by one, in nanoseconds.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

STEPS = 20_000
ROUNDS = 9


def nanoseconds(body: Callable[[Any], Any], init: Any, steps: int = STEPS) -> float:
    """What an iteration of a loop takes, at the best of some rounds."""
    run = jax.jit(lambda init: lax.fori_loop(0, steps, lambda _, c: body(c), init))
    jax.block_until_ready(run(init))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(init))
        times.append(time.perf_counter() - start)
    return min(times) / steps * 1e9


def dynamic_nanoseconds() -> float:
    """An iteration of a loop whose trip count is an input of the program."""
    body = lambda state: (state[0] - 1, state[1] * 0.5)
    run = jax.jit(lambda n: lax.while_loop(lambda s: s[0] > 0, body, (n, jnp.ones(8))))

    def best(count: int) -> float:
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(run(jnp.int32(count)))
            times.append(time.perf_counter() - start)
        return min(times)

    best(1)
    return (best(STEPS) - best(1)) / STEPS * 1e9


def main() -> None:
    """Prints the rates."""
    small, large = jnp.ones(64), jnp.ones(65536)
    entries = large.size - small.size
    slope = lambda f: (nanoseconds(f, large, 500) - nanoseconds(f, small)) / entries
    matrix = jnp.eye(256)
    product = nanoseconds(lambda h: matrix @ h, jnp.ones((256, 64)), 500)
    stack = jnp.zeros((64, 65536))
    store = lambda s: (s[0], lax.dynamic_update_index_in_dim(s[1], s[0], 3, 0))
    rates = {
        "flop": product / (2 * 256 * 256 * 64),
        "entry": slope(lambda h: h * 0.5),
        "costly_entry": slope(jnp.tanh),
        "equation": nanoseconds(lambda h: jnp.roll(h, 1) * 0.5, small),
        "byte": nanoseconds(store, (large, stack), 500) / (4 * large.size),
        "iteration": nanoseconds(lambda h: h * 0.5, jnp.ones(1)),
        "dynamic_iteration": dynamic_nanoseconds(),
    }
    print(jax.default_backend())
    for name, rate in rates.items():
        print(f"  {name:<20}{rate:.3g}")


if __name__ == "__main__":
    main()
