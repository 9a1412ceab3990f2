"""The search for the largest chunks that fit, in plain Python, no JAX."""

from collections.abc import Callable

from ._chunks import equal_chunks

# Once this full, it is not worth compiling another program.
_FULL = 0.8


def largest_that_fits(
    length: int, limit: int, bytes_of: Callable[[int], int]
) -> tuple[int, int]:
    """The largest size of equal chunks that take no more bytes than a limit.

    Each size that is tried is a program to compile. The next size is where a straight
    line through two known ones meets the limit; if this is slow, it is halfway between
    one that fits and one that does not. The search ends with a size that nearly uses up
    the limit, or whose next larger one is too large.

    Args:
        length: How many rows there are, at least 1.
        limit: The limit in bytes.
        bytes_of: The bytes that chunks of a size take, which increase with the size.

    Returns:
        The size and its bytes; or 0 and the bytes of a single row, if that is too much.

    Examples:
        >>> largest_that_fits(1000, 5000, lambda size: 100 + 20 * size)
        (200, 4100)
        >>> largest_that_fits(1000, 50, lambda size: 100 + 20 * size)
        (0, 120)
    """
    known = {0: 0}
    low, high, size = 0, length + 1, length
    while low < size < high:
        # `low` fits, `high` does not. From the fourth try on, every second one bisects:
        # memory may jump, and then a line is a bad guess again and again.
        is_slow = len(known) > 3 and len(known) % 2 == 0
        known[size] = bytes_of(size)
        if known[size] <= limit:
            low = size
        else:
            high = size
        if low == length or known[low] >= _FULL * limit:
            break
        guess = (low + high) // 2 if is_slow else _crossing(limit, low, high, known)
        size = equal_chunks(length, max(guess, 1)).size
        if not low < size < high:
            size = _above(length, low)
    return (low, known[low]) if low else (0, known[1])


def _crossing(limit: int, low: int, high: int, known: dict[int, int]) -> int:
    """The size at which a line through two known sizes meets the limit.

    One of them is below the limit and one above, if both are known.
    """
    larger = sorted(size for size in known if size >= high)
    first, second = (low, high) if low or len(larger) < 2 else larger[:2]
    rise = (known[second] - known[first]) / (second - first)
    guess = first + int((limit - known[first]) / rise) if rise > 0 else low
    # Two sizes that are both too large give a poor line.
    return guess if low else min(guess, high // 2)


def _above(length: int, size: int) -> int:
    """The next larger size of equal chunks."""
    count = -(-length // size) if size else length + 1
    return -(-length // (count - 1)) if count > 1 else length + 1
