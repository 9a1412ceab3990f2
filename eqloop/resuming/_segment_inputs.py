"""How a loop is cut, and what segments get: parts of arrays, keys, marks of cuts."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .._arrays import is_key
from .._types import PRNGKey, PyTree, Value
from ..loops import cuts_of
from ._sources import AbstractSource, read_ahead


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


def key_table(key: PRNGKey, length: int) -> np.ndarray:
    """The keys that a scan gives so many steps, or one if there are none."""
    # They have 8 bytes each.
    keys = jr.split(key, max(length, 1))
    return np.asarray(jr.key_data(keys) if is_key(keys) else keys)


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentInputs:
    """The inputs of all segments. Arrays are those of the scan, and then those of `xs`.

    Attributes:
        key: The key that the loop was called with, or `None`.
        table: The keys of all steps, as integers on the host, if each has its own.
        cut_every: How many steps lie between two cuts, if the scan is truncated.
    """

    segments: Segments
    scan: AbstractSource
    xs: AbstractSource
    key: PRNGKey | None
    table: np.ndarray | None
    cut_every: int | None

    def of_arrays(self, get: Callable[[AbstractSource], Iterable[Any]]) -> list[Any]:
        """Something for each array."""
        return [*get(self.scan), *get(self.xs)]

    def read(
        self, which: Iterable[int], *others: AbstractSource
    ) -> Iterator[tuple[Value, ...]]:
        """What each of these segments gets, which is read a segment ahead."""
        # The cuts are counted in the whole loop.
        which = list(which)
        bounds = [self.segments.bounds(k) for k in which]
        parts = read_ahead([self.scan, self.xs, *others], bounds)
        for k, at, (scan, xs, *more) in zip(which, bounds, parts, strict=True):
            yield [*scan, *xs], (self._keys(*at), self._cuts(k)), *more

    def types(self, steps: int) -> tuple[list[Any], PyTree]:
        """The types of the arrays of so many steps, and of the keys and the cuts."""
        marks = jax.ShapeDtypeStruct((steps,), np.dtype(bool))
        keys = jax.eval_shape(lambda: self._keys(0, steps))
        beside = keys, None if self.cut_every is None else marks
        return self.of_arrays(lambda source: source.types(steps)), beside

    def _keys(self, start: int, stop: int) -> PyTree:
        """The keys of some steps: one for each, one for all, or `None`."""
        if self.table is None:
            return self.key
        rows = jnp.asarray(self.table[start:stop])
        like: Any = self.key
        return jr.wrap_key_data(rows, impl=jr.key_impl(like)) if is_key(like) else rows

    def _cuts(self, k: int) -> np.ndarray | None:
        """Before which steps of a segment the carry is cut."""
        if self.cut_every is None:
            return None
        start, size = self.segments.done(k), self.segments.size(k)
        reverse = self.segments.reverse
        return cuts_of(self.cut_every, size, start=start, reverse=reverse)
