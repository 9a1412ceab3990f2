"""What stands for a value while buffers are followed through a program."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from ..._arrays import is_symbolic
from ..._types import Aval

# With fewer rows than this, no counter of 32 bits wraps around to a row that it has
# passed.
MOST_ROWS = 2**29


# What stands for a value: a number, a truth value, a `CounterIndex`, a `RingIndex`, a
# tuple of indices for an array of them, a `Buffer`, `Rows`, or `None` for anything.
Understood: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class CounterIndex:
    """A leaf of the carry, plus one of several numbers."""

    leaf: int
    offsets: frozenset[int]

    def plus(self, number: int) -> "CounterIndex | None":
        """The index plus a number; `None` if the sum may have wrapped around."""
        offsets = frozenset(offset + number for offset in self.offsets)
        is_small = all(abs(offset) < MOST_ROWS for offset in offsets)
        return CounterIndex(self.leaf, offsets) if is_small else None


@dataclasses.dataclass(frozen=True)
class RingIndex:
    """A leaf of the carry plus a number, modulo another number.

    The sum is not negative, so that it makes no difference how the remainder of
    negative numbers is defined.
    """

    leaf: int
    offset: int
    modulus: int


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a buffer that may have been written.

    Attributes:
        starts: Where it starts along each axis, as far as this is known.
        sizes: How long it is along each axis.
        is_clamped: Whether a block out of bounds is moved into the buffer.
        can_be_dropped: Whether it has a place that could be out of bounds, and is not
            moved from there by a scatter.
        made: The variable of the buffer that was written to; `None` if a loop has.
    """

    starts: tuple[Understood, ...]
    sizes: tuple[int, ...]
    is_clamped: bool
    can_be_dropped: bool
    made: jex.Var | None = None


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A leaf of the carry, or an array of zeros, with some blocks written to.

    Attributes:
        leaf: Which leaf; `None` for zeros.
        blocks: What was written.
        holds: The leaves that some of it was moved from.
        moved: Where its rows are, if whole rows were written at known places.
    """

    leaf: int | None
    blocks: frozenset[Block] = frozenset()
    holds: frozenset[int] = frozenset()
    moved: "Moved | None" = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """Something that was moved out of buffers, and not computed with."""

    leaves: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Moved(Rows):
    """Rows of a single leaf, moved along an axis, with new rows between them.

    Attributes:
        axis: The axis.
        parts: What lies along it: the rows of the leaf from one on to another one, or a
            number of new rows.
    """

    axis: int
    parts: tuple[tuple[int, int] | int, ...]

    def cut(self, start: int, stop: int) -> "Moved":
        """Some of the rows."""
        found = list[tuple[int, int] | int]()
        for part in self.parts:
            size = part if isinstance(part, int) else part[1] - part[0]
            low, high = max(start, 0), min(stop, size)
            if low < high and isinstance(part, int):
                found.append(high - low)
            elif low < high and not isinstance(part, int):
                found.append((part[0] + low, part[0] + high))
            start, stop = start - size, stop - size
        return dataclasses.replace(self, parts=tuple(found))


def moved_rows(known: Understood, axis: int, aval: Aval) -> Moved | None:
    """What lies along an axis of an array, if it is known which rows of a leaf do."""
    if isinstance(known, Buffer) and known.leaf is not None and not known.blocks:
        rows = aval.shape[axis]
        whole = Moved(frozenset([known.leaf]), axis, ((0, rows),))
        return None if is_symbolic(rows) else whole
    known = known.moved if isinstance(known, Buffer) else known
    return known if isinstance(known, Moved) and known.axis == axis else None


def known_of_leaf(i: int, aval: Aval) -> Understood:
    """What stands for a leaf of the carry before a step."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    if aval.ndim:
        return Buffer(i)
    return CounterIndex(i, frozenset([0])) if counts(aval) else None


def leaves_in(known: Understood) -> frozenset[int]:
    """The buffers that a value is a version of, or has something of."""
    if isinstance(known, Buffer):
        return known.holds if known.leaf is None else known.holds | {known.leaf}
    return known.leaves if isinstance(known, Rows) else frozenset()


def counts(aval: Aval) -> bool:
    """Whether values of a type may be counters: integers that do not soon wrap."""
    is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
    return is_integer and not aval.shape and aval.dtype.itemsize >= 4
