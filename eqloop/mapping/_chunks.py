"""How rows are cut into chunks of one size: integer arithmetic, no JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks of equal size that cover rows from the first to the last.

    Where their sizes add up to more than there are rows, the last chunk overlaps the
    one before it: it ends with the last row, and starts where it must.

    Attributes:
        rows: How many rows there are.
        size: How many of them are in each chunk.
        count: How many chunks there are.
    """

    rows: int
    size: int
    count: int

    @property
    def overlap(self) -> int:
        """How many rows are in the last chunk and in the one before it as well."""
        return self.count * self.size - self.rows

    @property
    def last(self) -> int:
        """The first row of the last chunk."""
        return self.rows - self.size

    @property
    def end(self) -> int:
        """The row after those of the last chunk but one."""
        return self.rows - self.size + self.overlap


def equal_chunks(rows: int, at_most: int) -> Chunks:
    """The fewest chunks of at most so many rows, and of those the smallest ones.

    The fewest, since every chunk has its overhead. The smallest, since they take the
    least memory and overlap the least: by fewer rows than there are chunks. So of 1000
    rows or more, in chunks of 100 or more, no more than one in a hundred is in two.

    Args:
        rows: How many rows there are.
        at_most: How many may be in a chunk, at least 1.

    Returns:
        The chunks; none if there are no rows.

    Examples:
        >>> equal_chunks(1000, 300)
        Chunks(rows=1000, size=250, count=4)
        >>> equal_chunks(1001, 300).overlap
        3
    """
    count = -(-rows // at_most)
    size = -(-rows // count) if count else 0
    return Chunks(rows, size, count)
