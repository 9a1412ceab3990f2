"""ProductSum with larger matrices, as products of tiles.

The numbers of a row are in vectors, one for each number. A product of matrices takes
tiles, so numbers go through memory, which is the cache:

    vectors  --stored-->  memory  --read-->  tile  --product-->  tile  -->  vectors

The rows of a block are the columns of a tile. A matrix that all rows share is read as
one. What such a matrix has for a cotangent is a sum of products of vectors, over steps
and rows; a block adds it up in a tile.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._types import Value
from ._entries import ProductSum, is_known, places_of


class NotTiledError(Exception):
    """A sum is not one of products of two vectors."""


def padded(n: int) -> int:
    """How long an axis of a tile is at least: a power of two."""
    return max(16, 1 << (n - 1).bit_length())


@dataclasses.dataclass
class Tiles:
    """Multiplies tiles in a kernel.

    Attributes:
        room: A reference to memory with a column for each row, and so many rows.
        own: The columns of the block.
        there: Which of its rows there are; `None` if all.
        wait: Has all threads of the block wait for one another.
        precision: How float32 is multiplied. Three products of TF32 are as precise, and
            on tensor cores. Written out, those of 64 x 64 took minutes to compile.
    """

    room: Any
    own: Value
    there: Value | None
    wait: Callable[[], None]
    precision: Any = lax.Precision.HIGHEST

    def product(
        self, scope: Any, left: np.ndarray, right: np.ndarray, dtype: Any
    ) -> list[Any] | None:
        """`left @ right.T` for each row, if one of them is a table that fits."""
        swaps = _table(left) is None
        table, others = (right, left) if swaps else (left, right)
        found = _table(table)
        if found is None or not self._holds(dtype, *table.shape):
            return None
        matrix = self._matrix(*found, len(table), table.shape[1], dtype)
        columns = [
            self._vectors(
                self._dot(matrix, self._tile(scope, column, dtype)), len(table)
            )
            for column in others
        ]
        if swaps:
            return [x for column in columns for x in column]
        return [x for row in zip(*columns, strict=True) for x in row]

    def outer(self, scope: Any, sums: np.ndarray, dtype: Any) -> Value:
        """The sum over the rows of the block of a matrix of products."""
        m, n = sums.shape
        if not self._holds(dtype, m, n):
            raise NotTiledError
        total = jnp.zeros((padded(m), padded(n)), dtype)
        for left, right in _families(scope, sums):
            if self.there is not None:
                there = self.there
                left = [jnp.where(there, x, jnp.zeros_like(x)) for x in left]
            a, b = self._tile(scope, left, dtype), self._tile(scope, right, dtype)
            total = total + self._dot(a, b, 1)
        return total

    def _holds(self, dtype: Any, *sizes: int) -> bool:
        return self.room.dtype == dtype and padded(max(sizes)) <= self.room.shape[0]

    def _tile(self, scope: Any, values: Sequence[Any], dtype: Any) -> Value:
        self.wait()
        for k, value in enumerate(values):
            self.room[k, self.own] = scope.vector(value, dtype)
        self.wait()
        size = padded(len(values))
        tile = self.room[self._index(size)]
        if size == len(values):
            return tile
        is_value = _numbers((size, 1), 0) < len(values)
        return jnp.where(
            jnp.broadcast_to(is_value, tile.shape), tile, jnp.zeros_like(tile)
        )

    def _vectors(self, tile: Value, count: int) -> list[Value]:
        self.wait()
        self.room[self._index(len(tile))] = tile
        self.wait()
        return [self.room[k, self.own] for k in range(count)]

    def _dot(self, a: Value, b: Value, axis: int = 0) -> Value:
        """A product of tiles, along the second axis of the first."""
        is_single = a.dtype == np.dtype("float32")
        return lax.dot_general(
            a,
            b,
            (((1,), (axis,)), ((), ())),
            precision=self.precision if is_single else lax.Precision.HIGHEST,
            preferred_element_type=a.dtype,
        )

    def _index(self, size: int) -> tuple[Value, Value]:
        shape = size, len(self.own)
        own = jnp.broadcast_to(self.own[None], shape)
        return jnp.broadcast_to(_numbers((size, 1), 0), shape), own

    def _matrix(
        self,
        read: Any,
        first: int,
        strides: tuple[int, int],
        m: int,
        n: int,
        dtype: Any,
    ) -> Value:
        shape = padded(m), padded(n)
        i, j = (_numbers(shape, axis) for axis in range(2))
        at = first + jnp.minimum(i, m - 1) * strides[0]
        tile = read(at + jnp.minimum(j, n - 1) * strides[1]).astype(dtype)
        if shape == (m, n):
            return tile
        return jnp.where((i < m) & (j < n), tile, jnp.zeros_like(tile))


def _numbers(shape: tuple[int, int], axis: int) -> Value:
    return lax.broadcasted_iota(np.dtype("int32"), shape, axis)


def _table(a: np.ndarray) -> tuple[Any, int, tuple[int, int]] | None:
    """How a matrix lies in memory: what reads it, where, and at which distances."""
    found = places_of(a)
    if found is None or not a.flat[0].is_table:
        return None
    read, at = found
    strides = tuple(
        int(np.take(at, 1, axis).flat[0] - at.flat[0]) if a.shape[axis] > 1 else 0
        for axis in range(2)
    )
    i, j = np.indices(a.shape)
    if (at != at.flat[0] + i * strides[0] + j * strides[1]).any():
        return None
    return read, int(at.flat[0]), (strides[0], strides[1])


def _families(scope: Any, sums: np.ndarray) -> list[tuple[list[Value], list[Any]]]:
    """A matrix of sums of products as a sum of products of two vectors."""
    m, zero = len(sums), np.float32(0)
    found = dict[Any, tuple[list[Any], list[Any]]]()
    for i, row in enumerate(sums):
        counts = {len(x.pairs) for x in row if isinstance(x, ProductSum)}
        if len(counts) > 1 or not all(
            isinstance(x, ProductSum) or (is_known(x) and x == 0) for x in row
        ):
            raise NotTiledError
        for k in range(counts.pop() if counts else 0):
            pairs = [x.pairs[k] if isinstance(x, ProductSum) else None for x in row]
            known = [pair for pair in pairs if pair is not None]
            side = next(
                (s for s in (0, 1) if all(p[s] is known[0][s] for p in known)), None
            )
            if side is None:
                raise NotTiledError
            right = [zero if p is None else p[1 - side] for p in pairs]
            key = tuple(0 if p is None else id(p[1 - side]) for p in pairs)
            left, _ = found.setdefault(key, ([zero] * m, right))
            term = scope.value(known[0][side])
            left[i] = term if left[i] is zero else left[i] + term
    return [
        ([jnp.broadcast_to(x, (scope.block,)) for x in left], right)
        for left, right in found.values()
    ]
