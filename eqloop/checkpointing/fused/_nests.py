"""Which carries a kernel stores: levels of segments, and nothing else."""

from collections.abc import Iterator

from ..engine.orders._levels import Nest, nests
from ..engine.orders._nested import Nested


def usual_nests(length: int, every: int | None = None) -> tuple[Nest, ...]:
    """Segments of `every` steps; by default, the fewest levels with few slots."""
    # By default, slots are no more than twice those of `Recursive`. Levels are few, as
    # each but the first runs nearly all steps once more.
    if every is None:
        most = 2 * max(Nested(nests(length, 16)).slots, 1)
        depth = next(d for d in range(1, 64) if d * _root(length, d) <= most)
        if depth != 2:
            return nests(length, max(_root(length, depth), 2))
    every = min(every or _root(length, 2), length)
    count, rest = divmod(length, every)
    parts = [Nest((count, every) if every > 1 else (count,))]
    return (*parts, Nest((1, rest))) if rest else tuple(parts)


def nests_to_try(length: int) -> Iterator[tuple[Nest, ...]]:
    """Those among which a budget chooses, from the most memory to the least."""
    yield usual_nests(length, 1)
    every, root = 2, _root(length, 2)
    while every < root:
        yield usual_nests(length, every)
        every *= 2
    for depth in (2, 3, 4):
        if (root := _root(length, depth)) > 1:
            yield usual_nests(length, root) if depth == 2 else nests(length, root)


def _root(length: int, depth: int) -> int:
    """The least `n` with `n**depth >= length`."""
    n = max(int(length ** (1 / depth)) - 1, 1)
    while n**depth < length:
        n += 1
    return n
