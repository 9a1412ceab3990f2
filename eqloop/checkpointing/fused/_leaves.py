"""How the numbers of a row lie in an array in memory."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import Aval, Value
from ._entries import InMemory, Parts, parts_of
from ._pallas import places, rows_from
from ._scope import objects, one_of
from ._tpu import shape_of


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of an array as a kernel sees it.

    Attributes:
        size: How long it is.
        first: The first of the axes of rows that it is, and then `last`; `None` if it
            has the numbers of a row.
        last: The last of them.
        is_time: Whether it has the steps.
    """

    size: int
    first: int | None = None
    last: int | None = None
    is_time: bool = False


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array, some of whose axes are rows, and one of them perhaps the steps.

    Attributes:
        dtype: Its dtype.
        shape: The shape of what one row has of it, at one step; 1 along its rows.
        axes: Its axes. Neighbouring axes of rows are one, if they are in order.
        given: The shape of the whole array.
    """

    dtype: Any
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    given: tuple[int, ...]

    @classmethod
    def of(
        cls,
        aval: Aval,
        rows: Sequence[int | None],
        time: tuple[int, int] | None = None,
    ) -> "Leaf":
        """The leaf for an array of which one step has a type, in all rows.

        `rows`: which axis of rows each axis is; `time`: the axis and number of steps.
        """
        sizes = list(aval.shape)
        axes = [Axis(n, r, r) for n, r in zip(sizes, rows, strict=True)]
        if time is not None:
            axes.insert(time[0], Axis(time[1], is_time=True))
        given = tuple(axis.size for axis in axes)
        count, _ = parts_of(aval.dtype)
        axes += [Axis(count)] if count > 1 else []
        merged = list[Axis]()
        for axis in axes:
            last = merged[-1] if merged else None
            follows = (
                last is not None
                and not (last.is_time or axis.is_time)
                and (last.last is None) == (axis.first is None)
                and (last.last is None or last.last + 1 == axis.first)
            )
            if last is not None and follows:
                size = last.size * axis.size
                merged[-1] = Axis(size, last.first, axis.last)
            else:
                merged.append(axis)
        shape = [1 if r is not None else n for n, r in zip(sizes, rows, strict=True)]
        return cls(aval.dtype, tuple(shape), tuple(merged), given)

    def is_sliced(self, count: int) -> bool:
        """Whether all of so many axes of rows are one axis, in order, or none is."""
        own = [(a.first, a.last) for a in self.axes if a.first is not None]
        return own in ([], [(0, count - 1)])

    @property
    def rows(self) -> frozenset[int]:
        """The axes of rows that it has."""
        found = set[int]()
        for axis in self.axes:
            if axis.first is not None and axis.last is not None:
                found.update(range(axis.first, axis.last + 1))
        return frozenset(found)

    @property
    def count(self) -> int:
        """How many numbers a row has of it, at one step."""
        return math.prod(self.shape) * parts_of(self.dtype)[0]

    @property
    def number(self) -> Any:
        """The dtype of these numbers."""
        return parts_of(self.dtype)[1]

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """The type of the array as a kernel sees it."""
        shape = tuple(axis.size for axis in self.axes)
        return jax.ShapeDtypeStruct(shape or (1,), self.number)

    def opened(self, x: Value) -> Value:
        """The array as a kernel sees it."""
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        elif parts_of(self.dtype)[0] > 1:
            x = jnp.stack([jnp.real(x), jnp.imag(x)], -1)
        return jnp.reshape(x, self.type.shape)

    def closed(self, x: Value) -> Value:
        """The array, from what a kernel has made of it."""
        count, _ = parts_of(self.dtype)
        is_key = jnp.issubdtype(self.dtype, jax.dtypes.prng_key)
        x = jnp.reshape(x, (*self.given, count) if count > 1 or is_key else self.given)
        if is_key:
            impl = jax.random.key_impl(jnp.zeros((), self.dtype))
            return jax.random.wrap_key_data(x, impl=impl)
        return jax.lax.complex(x[..., 0], x[..., 1]) if count > 1 else x

    @property
    def row_axis(self) -> int | None:
        """Which axis of the array is rows, as a kernel sees it, if one is."""
        found = (i for i, axis in enumerate(self.axes) if axis.first is not None)
        return next(found, None)

    def at(self, rows: Any, k: Any, time: Any = None) -> tuple[Any, ...]:
        """The index of the `k`-th number of each row of a block, at a step."""
        sizes = [a.size for a in self.axes if a.first is None and not a.is_time]
        inner = _unravelled(k, sizes)
        index = [
            time
            if axis.is_time
            else next(inner)
            if axis.first is None
            else rows.index(axis.first, axis.last)
            for axis in self.axes
        ]
        return tuple(index) or (0,)

    def read(self, ref: Any, rows: "RowNumbers", time: Any = None) -> np.ndarray:
        """Its numbers, to be read where they are used."""
        count = parts_of(self.dtype)[0]
        get = lambda k: ref[self.at(rows, k, time)]
        if count == 1 and rows.are_sliced:
            # Each by a function of its own: there are no tables, whose entries are
            # read at places that differ from row to row.
            made = [InMemory(lambda k: get(k), k) for k in range(self.count)]
        elif count == 1:
            is_table = not self.rows and time is None
            made = [InMemory(get, k, is_table) for k in range(self.count)]
        else:
            made = [
                InMemory(
                    lambda k: Parts(tuple(get(k * count + i) for i in range(count))), k
                )
                for k in range(self.count // count)
            ]
        return objects(made, self.shape)

    def write(
        self, ref: Any, rows: "RowNumbers", values: Sequence[Value], time: Any = None
    ) -> None:
        """Writes its numbers: vectors, or scalars if no axis of it is rows."""
        for k, value in enumerate(values):
            index = self.at(rows, k, time)
            if self.rows:
                value = jnp.broadcast_to(value, shape_of(rows.block))
            elif jnp.ndim(value):
                value = one_of(value)
            ref[index] = value.astype(self.number)


def _unravelled(k: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """The index of a flat position, axis by axis."""
    index = list[Any]()
    for n in reversed(sizes[1:]):
        index.append(k % n)
        k = k // n
    return iter([k, *reversed(index)])


@dataclasses.dataclass
class RowNumbers:
    """The numbers of the rows of a block.

    Attributes:
        sizes: How many rows there are along each axis.
        block: How many rows a block has.
        number: The block.
        are_sliced: Whether the rows of a block follow one another in memory. Then the
            last block has its last rows in common with the one before.
        are_tiles: Whether they are tiles of a TPU. Then there may be rows too many.
    """

    sizes: tuple[int, ...]
    block: int
    number: Any
    are_sliced: bool = False
    are_tiles: bool = False

    @property
    def own(self) -> Value:
        """The place of each row among those that blocks have, which may be more."""
        return self.number * self.block + places(self.block)

    @property
    def place(self) -> Any:
        """The index of `own`."""
        if self.are_sliced:
            return rows_from(self.number * self.block, self.block)
        return self.own

    @property
    def _first(self) -> Value:
        first, most = self.number * self.block, math.prod(self.sizes) - self.block
        if self.are_tiles or not most % self.block:
            return first
        return jnp.minimum(first, most)

    @property
    def flat(self) -> Value:
        """The number of each row. Rows too many are the last one again."""
        count = math.prod(self.sizes)
        if self.are_sliced:
            return self._first + places(self.block)
        return jnp.minimum(self.own, count - 1) if count % self.block else self.own

    @property
    def are_there(self) -> Value | None:
        """Which rows there are, and are of no other block; `None` if all."""
        count = math.prod(self.sizes)
        if self.are_tiles or not count % self.block:
            return None
        if self.are_sliced:
            return self.flat >= self.number * self.block
        return self.own < count

    def index(self, first: int, last: int | None) -> Any:
        """The index along axes that follow one another, in an array in memory."""
        if self.are_sliced:
            return rows_from(self._first, self.block)
        return self.along(first, last)

    def along(self, first: int, last: int | None) -> Value:
        """The numbers along axes that follow one another."""
        last = first if last is None else last
        after = math.prod(self.sizes[last + 1 :])
        number = self.flat if after == 1 else self.flat // after
        return (
            number if first == 0 else number % math.prod(self.sizes[first : last + 1])
        )
