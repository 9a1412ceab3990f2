"""How rows are cut into chunks of one size: integer arithmetic, no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks of equal size that cover all rows.

    If their sizes add up to more than the number of rows, the last chunk overlaps the
    one before it, and ends with the last row. If they add up to less, there is one more
    chunk, which is shorter.

        11 rows, 3 chunks of 4     [0 1 2 3][4 5 6 7]
                                                  [7 8 9 10]
        11 rows, 2 of 4 and a rest [0 1 2 3][4 5 6 7][8 9 10]

    Attributes:
        length: How many rows there are.
        size: How many rows are in each chunk.
        count: How many chunks of this size there are.
        rest: How many rows are in the shorter chunk, 0 if there is none.
    """

    length: int
    size: int
    count: int
    rest: int = 0

    @property
    def overlap(self) -> int:
        """How many rows are both in the last chunk and in the one before it."""
        return self.count * self.size + self.rest - self.length

    @property
    def last(self) -> int:
        """The first row of the last chunk of full size."""
        return self.length - self.rest - self.size

    @property
    def end(self) -> int:
        """The row after the second to last full chunk."""
        return self.last + self.overlap


def equal_chunks(length: int, at_most: int, *, exact: bool = False) -> Chunks:
    """The fewest chunks of at most so many rows, with the smallest size.

    The fewest, since every chunk has some overhead. The smallest size, since it takes
    the least memory and overlaps the least, by fewer rows than there are chunks. So
    with 1000 rows or more, in chunks of 100 or more, at most one row in a hundred is in
    two chunks.

    Args:
        length: How many rows there are.
        at_most: How many may be in a chunk, at least 1.
        exact: Whether no row may be in two chunks, so that the last may be shorter.

    Returns:
        The chunks; none if there are no rows.

    Examples:
        >>> equal_chunks(1000, 300)
        Chunks(length=1000, size=250, count=4, rest=0)
        >>> equal_chunks(1001, 300).overlap
        3
        >>> equal_chunks(1001, 300, exact=True)
        Chunks(length=1001, size=251, count=3, rest=248)
    """
    if at_most == 1:
        return Chunks(
            length, 1, length
        )  # of however many rows, also if that is symbolic
    count = -(-length // at_most)
    size = -(-length // count) if count else 0
    if exact and size:
        return Chunks(length, size, *divmod(length, size))
    return Chunks(length, size, count)
