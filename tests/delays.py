"""Shows what gradients of delay lines and of trees take.

python -m tests.delays            # both tables
python -m tests.delays --steps 2000 --nodes 1000 2000
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqloop as el

DELAY, WIDTH, ROUNDS = 500, 64, 9
NARROW = 16

Case = tuple[Callable[..., Any], Any]


def _next(w: Any, old: Any, x: Any) -> Any:
    return jnp.tanh(w @ old[0] + 0.5 * old[1] + x)


def _moved(read: Sequence[int], write: Callable[..., Any]) -> Callable[[Any], Case]:
    def made(w: Any) -> Case:
        def step(line: Any, x: Any) -> tuple[Any, None]:
            return write(line, _next(w, [line[i] for i in read], x)), None

        return step, jnp.zeros((DELAY, WIDTH))

    return made


def _counted(
    write: Callable[..., Any],
    after: Callable[[Any], Any],
    rows: int = DELAY,
    start: Any = 0,
) -> Callable[[Any], Case]:
    def made(w: Any) -> Case:
        def step(carry: Any, x: Any) -> tuple[Any, None]:
            i, line = carry
            back = (lambda d: line[(i - d) % rows]) if rows == DELAY else None
            old = [back(DELAY), back(8)] if back else [line[i], line[i + DELAY - 8]]
            return (after(i), write(line, _next(w, old, x), i)), None

        return step, (start, jnp.zeros((rows, WIDTH)))

    return made


def ways(steps: int) -> dict[str, Callable[[Any], Case]]:
    """The ways to write a delay line, after one whose rows are kept like `ys`."""
    first, last = (-1, 7), (0, DELAY - 8)
    one_more = lambda i: i + 1
    by_update = lambda line, h, i: lax.dynamic_update_slice(line, h[None], (i, 0))
    by_mask = lambda line, h, i: jnp.where((jnp.arange(DELAY) == i)[:, None], h, line)
    in_ring, start = lambda i: (i + 1) % DELAY, jnp.zeros((), jnp.int32)
    return {
        "all rows": _counted(
            lambda line, h, i: line.at[i + DELAY].set(h), one_more, steps + DELAY
        ),
        "roll": _moved(first, lambda line, h: jnp.roll(line, 1, 0).at[0].set(h)),
        "at[i % n]": _counted(lambda line, h, i: line.at[i % DELAY].set(h), one_more),
        "newest first": _moved(
            first, lambda line, h: jnp.concatenate([h[None], line[:-1]])
        ),
        "newest last": _moved(
            last, lambda line, h: jnp.concatenate([line[1:], h[None]])
        ),
        "shift": _moved(first, lambda line, h: line.at[1:].set(line[:-1]).at[0].set(h)),
        "update": _counted(by_update, in_ring),
        "update from an array": _counted(by_update, in_ring, start=start),
        "mask from an array": _counted(by_mask, in_ring, start=start),
    }


def seconds(programs: Sequence[Any], *args: Any) -> list[float]:
    """The processor time of programs, measured in turn: the least of a few rounds."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(ROUNDS):
        for program, found in zip(programs, times, strict=True):
            start = time.process_time()
            jax.block_until_ready(program(*args))
            found.append(time.process_time() - start)
    return list(map(min, times))


def delays(steps: int) -> None:
    """Prints what the ways to write a delay line take."""
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (WIDTH, WIDTH)) / 8
    xs = jax.random.normal(keys[1], (steps, WIDTH))

    def loss(scan: Callable[..., Any], make: Callable[[Any], Case]) -> Any:
        def of(w: Any, xs: Any) -> Any:
            carry, _ = scan(*make(w), xs)
            return jnp.sum(jax.tree.leaves(carry)[-1][-DELAY:] ** 2)

        return jax.jit(jax.grad(of)).lower(w, xs).compile()

    planned = lambda f, init, xs: el.Scan(f, schedule=el.Binomial(30))(init, xs)
    programs = {name: loss(planned, make) for name, make in ways(steps).items()}
    expected = loss(lax.scan, ways(steps)["update"])(w, xs)
    times = seconds(list(programs.values()), w, xs)
    print("| a delay line | memory | time, of that with all rows | error |")
    print("|---|---|---|---|")
    for (name, program), took in zip(programs.items(), times, strict=True):
        error = jnp.max(jnp.abs(program(w, xs) - expected)) / jnp.max(jnp.abs(expected))
        size = program.memory_analysis().temp_size_in_bytes
        print(
            f"| {name} | {size / 1e3:,.0f} KB | {took / times[0]:.2f} | {error:.1e} |"
        )


def tree(nodes: int) -> tuple[int, tuple[Any, Any, Any]]:
    """A random tree: how many nodes it has, and the order of those with children."""
    rng = np.random.default_rng(0)
    leaves = (nodes + 1) // 2
    nodes, free, found = 2 * leaves - 1, list(range(leaves)), list[Any]()
    for node in range(leaves, nodes):
        left, right = (free.pop(rng.integers(len(free))) for _ in range(2))
        found.append((node, left, right))
        free.append(node)
    places = rng.permutation(nodes)
    node, left, right = jnp.asarray(places[np.array(found)].T, jnp.int32)
    return nodes, (node, left, right)


def trees(sizes: Sequence[int]) -> None:
    """Prints what gradients of recursions over trees take."""
    print("| nodes | `jax.lax.scan` | | `el.Recursive(16)` | |\n|---|---|---|---|---|")
    for size in sizes:
        nodes, order = tree(size)
        w = jax.random.normal(jax.random.key(0), (NARROW, NARROW)) / 4
        rows = jax.random.normal(jax.random.key(1), (nodes, NARROW))

        def compiled(scan: Callable[..., Any], w: Any, rows: Any, order: Any) -> Any:
            def loss(w: Any, rows: Any, order: Any) -> Any:
                def step(rows: Any, x: Any) -> tuple[Any, None]:
                    i, left, right = x
                    row = jnp.tanh(w @ rows[left] + rows[right] * rows[left])
                    return rows.at[i].set(row), None

                return jnp.sum(scan(step, rows, order)[0][order[0][-1]] ** 2)

            return jax.jit(jax.grad(loss, (0, 1))).lower(w, rows, order).compile()

        planned = lambda f, init, xs: el.Scan(f, schedule=el.Recursive(16))(init, xs)
        programs = [compiled(scan, w, rows, order) for scan in (lax.scan, planned)]
        times = seconds(programs, w, rows, order)
        sizes_of = [one.memory_analysis().temp_size_in_bytes for one in programs]
        cells = [
            f"{nbytes / 1e3:,.0f} KB | {1e3 * took:.1f} ms"
            for nbytes, took in zip(sizes_of, times, strict=True)
        ]
        print(f"| {size:,} | {' | '.join(cells)} |")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    sizes = [1000, 2000, 4000, 8000]
    parser.add_argument("--nodes", type=int, nargs="*", default=sizes)
    options = parser.parse_args()
    delays(options.steps)
    print()
    trees(options.nodes)


if __name__ == "__main__":
    main()
