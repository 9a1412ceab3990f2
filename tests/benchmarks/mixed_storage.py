"""How many evaluations it takes to store carries and residuals in the same slots.

`python -m tests.benchmarks.mixed_storage` prints the table of `docs/how_it_works.md`:
evaluations a step, the primal included, where a slot holds a carry.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from eqloop.checkpointing.engine.orders._mixed import Mixed
from eqloop.checkpointing.engine.orders._revolved import Revolved

STEPS = 400
SLOTS = (10, 20, 40)
# The residuals of a step, in slots.
ROWS = (1, 2, 6)


def in_blocks(steps: int, slots: int, rows: int) -> int:
    """By the best of carries alone and of blocks with room for their residuals."""
    orders = [Revolved(steps, slots)]
    for block in range(2, slots):
        if (left := slots - block * rows) > 0:
            orders.append(Revolved(steps, left, block))
    return min(order.evaluations for order in orders)


@functools.cache
def least(steps: int, slots: int, rows: int) -> list[int]:
    """By a dynamic program over all that can be done, for every number of slots.

    `carry[n, s]` is for a chain of `n` steps whose first carry is stored, with `s` free
    slots; `hand[n, s]` for one whose first carry is at hand, and not stored.
    """
    carry, hand, primal = (np.zeros((steps + 1, slots + 1), int) for _ in range(3))
    never = 10**9
    for free in range(slots + 1):
        for n in range(1, steps + 1):
            far = np.arange(1, n)
            residuals = 1 + hand[n - 1, free - rows] if free >= rows else never
            advance = far + hand[n - far, free] + carry[far, free]
            directly = 1 if n == 1 else never
            carry[n, free] = min([directly, residuals, *advance])
            stored = carry[n, free - 1] if free else never
            hand[n, free] = min(directly, residuals, stored)
        for n in range(1, steps + 1):
            far = np.arange(1, n + 1)
            options = [never]
            if free >= rows:
                options.append(1 + primal[n - 1, free - rows])
            if free:
                after = primal[n - far, free - 1] + carry[far, free - 1]
                options.append(min(far + after))
            primal[n, free] = min(options)
    return primal[steps].tolist()


def rows_of_table() -> Iterator[str]:
    """The table, in Markdown."""
    yield "| residuals | slots | carries, or blocks | both in slots | fewer | least |"
    yield "|---|---|---|---|---|---|"
    for rows in ROWS:
        for slots in SLOTS:
            found = Mixed(STEPS, slots, rows).evaluations
            counts = in_blocks(STEPS, slots, rows), found
            fewer = math.floor(100 * (1 - found / counts[0]) + 0.5)
            before, now, best = (
                f"{count / STEPS:.2f}"
                for count in (*counts, least(STEPS, max(SLOTS), rows)[slots])
            )
            each = "1 carry" if rows == 1 else f"{rows} carries"
            yield f"| {each} | {slots} | {before} | {now} | {fewer} % | {best} |"


if __name__ == "__main__":
    print("\n".join(rows_of_table()))
