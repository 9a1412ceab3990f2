"""How long loops take that write small rows into a large array, by plain JAX.

`python -m tests.benchmarks.small_writes` prints a line for the JAX that is installed.
eqloop is not imported: it refuses the jaxlib of JAX 0.11.1, where such loops take time
quadratic in their length on a CPU. `docs/asked_elsewhere.md` has the lines of two.
"""

import functools
import time

import jax
import jax.numpy as jnp

STEPS, BYTES = 20_000, 240
ENTRIES = (200_000, 2_000_000)


@functools.partial(jax.jit, donate_argnums=0)
def written(array: jax.Array) -> jax.Array:
    """The array, with a row written at each step."""

    def body(i: jax.Array, array: jax.Array) -> jax.Array:
        row = jnp.full(BYTES // 4, 1.0) * i.astype(jnp.float32)
        return jax.lax.dynamic_update_slice(array, row, (i,))

    return jax.lax.fori_loop(0, STEPS, body, array)


def seconds(entries: int, rounds: int = 3) -> float:
    """The shortest time of some runs."""

    def once() -> float:
        array = jnp.zeros(entries).block_until_ready()
        start = time.perf_counter()
        jax.block_until_ready(written(array))
        return time.perf_counter() - start

    return min(once() for _ in range(rounds + 1))


def in_words(taken: float) -> str:
    """So many seconds, or milliseconds, with two figures."""
    return f"{taken:.2g} s" if taken >= 1 else f"{1e3 * taken:.1f} ms"


if __name__ == "__main__":
    times = (in_words(seconds(entries)) for entries in ENTRIES)
    print(f"| {jax.__version__} | {' | '.join(times)} |")
