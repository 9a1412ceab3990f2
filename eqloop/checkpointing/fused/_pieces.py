"""A loop in segments, and in several launches if it is long."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._types import Index, Value
from ..engine.orders._levels import Nest


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A loop in several launches, each of so many segments.

    Attributes:
        count: How many launches there are.
        size: How many segments each of them runs.
    """

    count: int
    size: int

    @classmethod
    def of(cls, joined: Sequence[tuple[Nest, int]], most: int) -> "Pieces":
        """For launches of so many steps at most, or of one segment."""
        if len(joined) > 1:
            return cls(1, 0)
        ((nest, length),) = joined
        segments, size = -(-length // nest.stride), max(most // nest.stride, 1)
        return cls(-(-segments // size), size)

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def first(self, piece: Index) -> Value:
        """The first segment of a piece, as an array for a kernel."""
        return jnp.full((1,), piece * self.size, np.dtype("int32"))

    def bounds(self, segments: Index, refs: Sequence[Any]) -> tuple[Index, Index]:
        """From which segment on, and up to which, a launch runs."""
        if not self.are_several:
            return 0, segments
        first = refs[0][0]
        return first, jnp.minimum(first + self.size, segments)


def joined_nests(nests: Sequence[Nest]) -> list[tuple[Nest, int]]:
    """Nests with the number of their steps; a shorter last segment is part of one.

    A kernel has the step once for each of them, and so compiles in half of the time.
    """
    joined = [(nest, nest.length) for nest in nests]
    if len(nests) == 2:
        first, last = nests
        is_short = last.levels[0] == 1 and last.length < first.stride
        if is_short and len(first.levels) == 2:
            return [(first, first.length + last.length)]
    return joined


def carries_of(nests: Sequence[Nest]) -> int:
    """How many carries of a row are stored, and are in a scratch on the way back."""
    return sum(sum(nest.levels) for nest in nests)


def steps_of(nest: Nest, first: Index, end: Any) -> Any:
    """How many steps the segment has that starts at a step, if there are so many."""
    if isinstance(end, int) and end % nest.stride == 0:
        return nest.stride
    return jnp.minimum(nest.stride, end - first)


def repeated(
    low: Index,
    high: Index,
    body: Callable[[Index, Any], Any],
    state: Any,
    goes_on: Callable[[Any], Value] | None = None,
) -> Any:
    """What `lax.fori_loop` gives, which may end when its state says so."""
    if goes_on is None:
        return lax.fori_loop(low, high, body, state)
    again = lambda at: (at[0] < high) & goes_on(at[1])
    start = jnp.asarray(low, jnp.int32), state
    return lax.while_loop(again, lambda at: (at[0] + 1, body(*at)), start)[1]
