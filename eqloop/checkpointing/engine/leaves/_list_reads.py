"""Runs a program that reads rows of a buffer of which only a list of rows is there.

Most steps read few rows of a buffer. To make all of it from its list, for a row to be
taken out of that, would take time in proportion to the buffer at every step. So the
program is gone through with a `ListedBuffer` in place of the buffer, and an equation
that reads rows of it reads them in the list instead:

    row = dynamic_slice(line, i)       becomes   row = dynamic_slice(list, entry of i)

What is read after the step has written a row itself is that row or one of the list
(`WrittenBuffer`). For any other equation the whole buffer is made.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ...._compat import called_by
from ...._programs import READS, evaluated, interpreted, row_write, value_of
from ...._types import AnyJaxpr, Value
from ._row_lists import RowList


class Found(NamedTuple):
    """What an equation reads of a buffer.

    Attributes:
        value: Its result.
        rows: The rows that it reads, -1 for none; with as many axes as the result.
    """

    value: Value
    rows: Value


class AbstractBuffer(abc.ABC):
    """A buffer in the carry before a step, or after a write, in place of its value."""

    @abc.abstractmethod
    def whole(self) -> Value:
        """The buffer itself."""

    @abc.abstractmethod
    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        """What an equation reads; `None` if it takes the whole buffer to tell.

        Args:
            eqn: The equation, one of `READS`.
            others: Its other operands.
        """

    @abc.abstractmethod
    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> "AbstractBuffer | None":
        """The buffer after a write of a single row; `None` if it is another write."""

    def result(self, eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Any:
        """The result of any equation: a value, a buffer, or `None` if it is unknown.

        Args:
            eqn: The equation.
            ins: Its operands, one of which is this buffer.
        """
        others = [whole(x) for x in ins[1:]]
        if ins[0] is self and eqn.primitive.name in READS:
            found = self.read(eqn, others)
            return None if found is None else found.value
        if ins[0] is self and row_write(eqn) is not None:
            return self.written(eqn, others)
        return None


@dataclasses.dataclass(frozen=True)
class ListedBuffer(AbstractBuffer):
    """The buffer before a step.

    Attributes:
        own: How its rows are written.
        arrays: What it is made from, see `RowList.before`.
        count: The counter before the step. For a batch of steps it has an axis, and so
            has the buffer.
    """

    own: RowList
    arrays: Sequence[Value]
    count: Value

    def whole(self) -> Value:
        if not self.count.ndim:
            return self._before(self.count)
        return jax.vmap(self._before)(self.count)

    def _before(self, count: Value) -> Value:
        return self.own.before(*self.arrays, count=count)

    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        rows, first, *tables = self.arrays
        if self.count.ndim:
            return None
        entries = lambda at: self.own.entries(at, first, tables, self.count)
        return read_rows(eqn, others, rows, self.own.axis, self.own.rows, entries)

    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> AbstractBuffer | None:
        return None if self.count.ndim else WrittenBuffer.of(self, eqn, others)


@dataclasses.dataclass(frozen=True)
class WrittenBuffer(AbstractBuffer):
    """A buffer after the write of a row.

    Attributes:
        before: The buffer before that.
        own: How its rows are written.
        eqn: The write.
        others: The other operands of it.
        at: The row, -1 if it is out of bounds.
        row: What is written, a buffer of one row.
    """

    before: AbstractBuffer
    own: RowList
    eqn: jex.JaxprEqn
    others: Sequence[Value]
    at: Value
    row: Value

    @classmethod
    def of(
        cls, before: Any, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> "WrittenBuffer | None":
        write, own = row_write(eqn), before.own
        shape = eqn.outvars[0].aval.shape
        one_row = (*shape[: own.axis], 1, *shape[own.axis + 1 :])
        if (
            write is None
            or eqn.primitive.name == "scatter-add"
            or write.sizes != one_row
            or own.axis not in write.axes
            or own.rows == 1
        ):
            return None
        place = write.axes.index(own.axis)
        if eqn.primitive.name == "scatter":
            if others[0].ndim > 1:
                return None
            first = others[0][place]
        else:
            first = others[1 + place]
        inside = jnp.clip(first, 0, own.rows - 1)
        at = inside.astype(jnp.int32)
        if not write.is_clamped:
            at = jnp.where(inside == first, at, -1)
        row = lax.reshape(others[write.place - 1], one_row)
        return cls(before, own, eqn, others, at, row)

    def whole(self) -> Value:
        return evaluated(self.eqn, [self.before.whole(), *self.others])[0]

    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        if (found := self.before.read(eqn, others)) is None:
            return None
        axis, rows = self.own.axis, self.own.rows
        new = read_rows(eqn, others, self.row, axis, rows, jnp.zeros_like)
        assert new is not None
        return Found(jnp.where(new.rows == self.at, new.value, found.value), new.rows)

    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> AbstractBuffer | None:
        return WrittenBuffer.of(self, eqn, others)


def run_reading(program: AnyJaxpr, inputs: Sequence[Any]) -> list[Value]:
    """The outputs of a program, some of whose inputs are buffers that are not there.

    Args:
        program: The program.
        inputs: Its inputs: values, and an `AbstractBuffer` for each such buffer.
    """
    return list(map(whole, results(program, inputs)))


def results(program: AnyJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """The same, with buffers among the outputs."""
    return interpreted(program, inputs, value_of, _result, lambda value: value)


def whole(x: Any) -> Value:
    """A value, whether or not a buffer is in its place."""
    return x.whole() if isinstance(x, AbstractBuffer) else x


def _result(eqn: jex.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    buffers = [x for x in ins if isinstance(x, AbstractBuffer)]
    if buffers and (inner := called_by(eqn)) is not None:
        return results(inner, ins)
    if buffers and (found := buffers[0].result(eqn, ins)) is not None:
        return [found]
    return evaluated(eqn, list(map(whole, ins)))


def read_rows(
    eqn: jex.JaxprEqn,
    others: Sequence[Value],
    source: Value,
    axis: int,
    rows: int,
    entries: Callable[[Value], Value],
) -> Found | None:
    """What an equation reads of a buffer, out of another array that has its rows.

    Args:
        eqn: The equation.
        others: Its operands but the buffer.
        source: The array.
        axis: The axis of the rows.
        rows: How many rows the buffer has.
        entries: Where in the array rows of the buffer are.
    """
    if eqn.primitive.name == "gather":
        return _gathered(eqn, others[0], source, axis, rows, entries)
    # The rows of a slice, and then the slice of these along all other axes.
    if eqn.primitive.name == "slice":
        starts, stops = (
            list(eqn.params[name]) for name in ("start_indices", "limit_indices")
        )
        strides = list(eqn.params["strides"] or [1] * len(starts))
        at = jnp.arange(starts[axis], stops[axis], strides[axis], dtype=jnp.int32)
        starts[axis], stops[axis], strides[axis] = 0, len(at), 1
        cut = functools.partial(
            lax.slice, start_indices=starts, limit_indices=stops, strides=strides
        )
    else:
        sizes, starts = eqn.params["slice_sizes"], list(others)
        first = jnp.clip(starts[axis], 0, rows - sizes[axis]).astype(jnp.int32)
        at = first + jnp.arange(sizes[axis], dtype=jnp.int32)
        starts[axis] = jnp.zeros_like(starts[axis])
        cut = lambda part: lax.dynamic_slice(part, starts, sizes)
    if len(at) == rows > 1:
        return None
    if len(at) == 1:
        part = lax.dynamic_slice_in_dim(
            source, entries(at[0]), 1, axis, allow_negative_indices=False
        )
    else:
        part = jnp.take(source, entries(at), axis, mode="clip")
    shape = [1] * source.ndim
    shape[axis] = len(at)
    return Found(cut(part), at.reshape(shape))


def _gathered(
    eqn: jex.JaxprEqn,
    indices: Value,
    source: Value,
    axis: int,
    rows: int,
    entries: Callable[[Value], Value],
) -> Found | None:
    numbers = eqn.params["dimension_numbers"]
    sizes, mode = eqn.params["slice_sizes"], eqn.params["mode"]
    is_by_row = axis in numbers.start_index_map and sizes[axis] == 1
    if not is_by_row or numbers.operand_batching_dims or rows == 1:
        return None
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    place = numbers.start_index_map.index(axis)
    asked = indices[..., place]
    inside = jnp.clip(asked, 0, rows - 1)
    at = inside.astype(jnp.int32)
    entry, is_inside = entries(at), inside == asked
    if mode != lax.GatherScatterMode.CLIP:
        # An index out of bounds stays one.
        entry = jnp.where(is_inside, entry, source.shape[axis])
        at = jnp.where(is_inside, at, -1)
    is_place = jnp.arange(indices.shape[-1]) == place
    # As wide as the numbers of entries need.
    indices = indices.astype(jnp.int32) if indices.dtype.itemsize == 4 else indices
    entry = entry.astype(indices.dtype)
    indices = jnp.where(is_place, entry[..., None], indices)
    params = eqn.params | dict(indices_are_sorted=False, unique_indices=False)
    value = eqn.primitive.bind(source, indices, **params)
    # The axes of the result that are not those of a slice are those of the indices.
    shape, sizes_left = [1] * value.ndim, iter(at.shape)
    for own in range(value.ndim):
        if own not in numbers.offset_dims:
            shape[own] = next(sizes_left)
    return Found(value, at.reshape(shape))
