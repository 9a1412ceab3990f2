"""How rows are cut into chunks of one size: integer arithmetic, no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks of equal size that cover rows from the first to the last.

    Where their sizes add up to more than there are rows, the last chunk overlaps the
    one before it: it ends with the last row, and starts where it must. Where they add
    up to less, there is one more chunk, which is shorter.

    Attributes:
        length: How many rows there are.
        size: How many of them are in each chunk.
        count: How many chunks there are of that size.
        rest: How many rows are in the shorter one.
    """

    length: int
    size: int
    count: int
    rest: int = 0

    @property
    def overlap(self) -> int:
        """How many rows are in the last chunk and in the one before it as well."""
        return self.count * self.size + self.rest - self.length

    @property
    def last(self) -> int:
        """The first row of the last chunk of full size."""
        return self.length - self.rest - self.size

    @property
    def end(self) -> int:
        """The row after those of the last full chunk but one."""
        return self.last + self.overlap


def equal_chunks(length: int, at_most: int, *, exact: bool = False) -> Chunks:
    """The fewest chunks of at most so many rows, and of those the smallest ones.

    The fewest, since every chunk has its overhead. The smallest, since they take the
    least memory and overlap the least: by fewer rows than there are chunks. So of 1000
    rows or more, in chunks of 100 or more, no more than one in a hundred is in two.

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
