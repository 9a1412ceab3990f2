"""How a loop is cut into segments. Integers alone."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Segments:
    """A loop in segments of `every` steps; the last may be shorter.

    Attributes:
        length: How many steps the loop has.
        reverse: Whether the last element comes first.

    >>> segments = Segments(length=10, every=4, reverse=True)
    >>> [segments.bounds(k) for k in range(len(segments))]
    [(6, 10), (2, 6), (0, 2)]
    """

    # Segments are counted in the order in which they are run, so that with `reverse`
    # the first of them has the last elements of `xs`.

    length: int
    every: int
    reverse: bool

    def __len__(self) -> int:
        return -(-self.length // self.every)

    def done(self, k: int) -> int:
        """How many steps were run before segment `k`."""
        return min(k * self.every, self.length)

    def size(self, k: int) -> int:
        """How many steps segment `k` has."""
        return self.done(k + 1) - self.done(k)

    def bounds(self, k: int) -> tuple[int, int]:
        """Where the elements of segment `k` start and stop in `xs`."""
        start, stop = self.done(k), self.done(k + 1)
        if self.reverse:
            return self.length - stop, self.length - start
        return start, stop
