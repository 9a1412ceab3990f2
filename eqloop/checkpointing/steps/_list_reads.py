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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import pick, put
from ..._compat import called_by
from ..._programs import READS, aval_of, evaluated, interpreted, row_write, value_of
from ..._types import AnyJaxpr, Value
from ._buffers import returns_operands
from ._loop import part
from ._row_lists import RowList


class Found(NamedTuple):
    """What an equation reads of a buffer.

    Attributes:
        value: Its result.
        rows: The rows that it reads, -2 for none; with as many axes as the result.
        steps: What `RowSource.read` was given, with as many axes if it has any.
    """

    value: Value
    rows: Value
    steps: Value


class AbstractBuffer(abc.ABC):
    """A buffer in the carry before a step, or after a write, in place of its value."""

    @abc.abstractmethod
    def whole(self) -> Value:
        """The buffer itself."""

    @abc.abstractmethod
    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        """What one of `READS` reads; `None` if it takes the whole buffer to tell.

        `others` are its operands but the buffer.
        """

    @abc.abstractmethod
    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> "AbstractBuffer | None":
        """The buffer after a write of a single row; `None` if it is another write."""

    def result(self, eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Any:
        """The result of any equation: a value, a buffer, or `None` if it is unknown.

        `ins` are its operands, one of which is this buffer.
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
        source = RowSource(
            rows,
            self.own.axis,
            self.own.rows,
            lambda at, count: self.own.entries(at, first, tables, count),
        )
        return source.read(eqn, others, self.count)

    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> AbstractBuffer | None:
        return WrittenBuffer.of(self, self.own, self.count, eqn, others)


@dataclasses.dataclass(frozen=True)
class WrittenBuffer(AbstractBuffer):
    """A buffer after the write of a row.

    Attributes:
        before: The buffer before that.
        own: How its rows are written.
        count: The counter before the step, see `ListedBuffer`.
        eqn: The write.
        others: The other operands of it.
        at: The row, -1 if it is out of bounds.
        row: What is written, a buffer of one row.
    """

    before: AbstractBuffer
    own: RowList
    count: Value
    eqn: jex.JaxprEqn
    others: Sequence[Value]
    at: Value
    row: Value

    @classmethod
    def of(
        cls,
        before: AbstractBuffer,
        own: RowList,
        count: Value,
        eqn: jex.JaxprEqn,
        others: Sequence[Value],
    ) -> "WrittenBuffer | None":
        """It, if an equation writes a row and nothing else."""
        write, lead = row_write(eqn), count.ndim
        axis, shape = own.axis + lead, list(aval_of(eqn.outvars[0]).shape)
        shape[axis] = 1
        one_row = [1] * lead + shape[lead:]
        if (
            write is None
            or eqn.primitive.name == "scatter-add"
            or list(write.sizes) != one_row
            or axis not in write.axes
            or own.rows == 1
        ):
            return None
        place = write.axes.index(axis)
        if eqn.primitive.name == "scatter":
            numbers = eqn.params["dimension_numbers"]
            batched = numbers.operand_batching_dims
            if (
                others[0].ndim != 1 + lead
                or len(batched) != lead
                or 0 in batched[lead:]
            ):
                return None
            first = others[0][..., place]
        elif lead:
            return None
        else:
            first = others[1 + place]
        inside = jnp.clip(first, 0, own.rows - 1)
        at = inside.astype(jnp.int32)
        if not write.is_clamped:
            at = jnp.where(inside == first, at, -1)
        row = lax.reshape(others[write.place - 1], shape)
        return cls(before, own, count, eqn, others, at, row)

    def whole(self) -> Value:
        return evaluated(self.eqn, [self.before.whole(), *self.others])[0]

    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        if (found := self.before.read(eqn, others)) is None:
            return None
        nothing = lambda at, count: jnp.zeros_like(at)
        row = RowSource(
            self.row, self.own.axis, self.own.rows, nothing, self.at.ndim > 0
        )
        new = row.read(eqn, others, self.at)
        assert new is not None
        is_new = new.rows == new.steps
        return found._replace(value=jnp.where(is_new, new.value, found.value))

    def written(
        self, eqn: jex.JaxprEqn, others: Sequence[Value]
    ) -> AbstractBuffer | None:
        return WrittenBuffer.of(self, self.own, self.count, eqn, others)


@dataclasses.dataclass(frozen=True)
class RowSource:
    """An array that has the rows of a buffer.

    Attributes:
        array: The array.
        axis: The axis of the rows in both.
        rows: How many rows the buffer has.
        entries: From rows of the buffer, and what differs from step to step of a batch,
            to where they are in the array.
        is_stacked: Whether the array has an axis for a batch of steps in front.
    """

    array: Value
    axis: int
    rows: int
    entries: Callable[[Value, Value], Value]
    is_stacked: bool = False

    def read(
        self, eqn: jex.JaxprEqn, others: Sequence[Value], of_step: Value
    ) -> Found | None:
        """What an equation reads of the buffer, which is not among `others`.

        `of_step` is what `entries` is given.
        """
        # If `of_step` has an axis, the buffer has one more in front, for a batch of
        # steps.
        lead, name, params = of_step.ndim, eqn.primitive.name, eqn.params
        if self.rows == 1:
            return None
        if name == "gather":
            return self._gathered(eqn, others[0], of_step)
        if name == "slice":
            starts, stops = map(
                list, (params["start_indices"], params["limit_indices"])
            )
            strides = list(params["strides"] or [1] * len(starts))
            sizes = [
                -(-(b - a) // c) for a, b, c in zip(starts, stops, strides, strict=True)
            ]
        else:
            starts, sizes = list(others), list(params["slice_sizes"])
            strides = [1] * len(starts)
        if lead and sizes[0] != of_step.shape[0]:
            return None
        return self._sliced(starts[lead:], sizes[lead:], strides[lead:], of_step)

    def _sliced(
        self,
        starts: list[Any],
        sizes: list[int],
        strides: list[int],
        of_step: Value,
    ) -> Found | None:
        axis, size = self.axis, sizes[self.axis]
        if size == self.rows:
            return None
        first = jnp.asarray(starts[axis])
        if strides[axis] == 1:
            first = jnp.clip(first, 0, self.rows - size)
        at = first.astype(jnp.int32) + strides[axis] * jnp.arange(size, dtype=jnp.int32)
        # These rows, and then the slice of them along all other axes.
        # All starts of a slice have one type.
        starts[axis] = 0 if isinstance(starts[axis], int) else first * 0

        def cut(array: Value, of_step: Value) -> Value:
            entries = self.entries(at, of_step)
            if size == 1:
                rows = part(array, entries[0], 1, axis)
            else:
                rows = jnp.take(array, entries, axis, mode="clip")
            spans = [1 + (n - 1) * s for n, s in zip(sizes, strides, strict=True)]
            spans[axis] = size
            rows = lax.dynamic_slice(rows, starts, spans)
            steps = [1 if i == axis else s for i, s in enumerate(strides)]
            return (
                rows
                if set(steps) == {1}
                else lax.slice(rows, [0] * rows.ndim, rows.shape, steps)
            )

        shape = [size if i == axis else 1 for i in range(len(sizes))]
        rows = at.reshape(shape)
        if not of_step.ndim:
            return Found(cut(self.array, of_step), rows, of_step)
        axes = (0 if self.is_stacked else None, 0)
        value = jax.vmap(cut, axes)(self.array, of_step)
        return Found(value, rows[None], of_step.reshape([-1] + [1] * len(sizes)))

    def _gathered(
        self, eqn: jex.JaxprEqn, indices: Value, of_step: Value
    ) -> Found | None:
        lead, numbers = of_step.ndim, eqn.params["dimension_numbers"]
        sizes, mode = eqn.params["slice_sizes"], eqn.params["mode"]
        axis = self.axis + lead
        is_by_row = axis in numbers.start_index_map and sizes[axis] == 1
        if not is_by_row or numbers.operand_batching_dims != (0,) * lead:
            return None
        if indices.dtype.itemsize < 4:
            indices = indices.astype(jnp.int32)
        place = numbers.start_index_map.index(axis)
        asked = indices[..., place]
        steps = of_step
        if lead:
            shape = [1] * asked.ndim
            shape[numbers.start_indices_batching_dims[0]] = -1
            steps = of_step.reshape(shape)
        inside = jnp.clip(asked, 0, self.rows - 1)
        at, is_inside = inside.astype(jnp.int32), inside == asked
        entry = self.entries(at, steps)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            # An index out of bounds stays one. Else XLA moves it into the buffer.
            entry = jnp.where(is_inside, entry, self.array.shape[axis - lead])
            at = jnp.where(is_inside, at, -2)
        # There may be more entries than an index of few bits can number.
        places = lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1)
        entry = entry.astype(indices.dtype)[..., None]
        indices = jnp.where(places == place, entry, indices)
        if lead and not self.is_stacked:
            # All steps read the same array, so it has no axis for them.
            less = lambda axes: tuple(each - 1 for each in axes)
            numbers = lax.GatherDimensionNumbers(
                offset_dims=numbers.offset_dims,
                collapsed_slice_dims=less(numbers.collapsed_slice_dims),
                start_index_map=less(numbers.start_index_map),
            )
            sizes = sizes[1:]
        changed = dict(
            dimension_numbers=numbers,
            slice_sizes=sizes,
            indices_are_sorted=False,
            unique_indices=False,
        )
        value = eqn.primitive.bind(self.array, indices, **(eqn.params | changed))
        # The axes of the result that are not those of a slice are those of the indices.
        own = [i for i in range(value.ndim) if i not in numbers.offset_dims]
        spread = lambda x: lax.expand_dims(x, list(numbers.offset_dims))
        assert len(own) == at.ndim
        if mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
            # Of what XLA has moved into the buffer, JAX drops the cotangent.
            value = jnp.where(spread(is_inside), value, lax.stop_gradient(value))
        return Found(value, spread(at), spread(steps) if lead else steps)


def run_reading(program: AnyJaxpr, inputs: Sequence[Any]) -> list[Value]:
    """The outputs of a program, some of whose inputs are buffers that are not there.

    For each such buffer there is an `AbstractBuffer` among the inputs.
    """
    return list(map(whole, results(program, inputs)))


def results(program: AnyJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program on values and buffers, with buffers among them."""
    return interpreted(program, inputs, value_of, _result, lambda value: value)


def whole(x: Any) -> Value:
    """A value, whether or not a buffer is in its place."""
    return x.whole() if isinstance(x, AbstractBuffer) else x


def _result(eqn: jex.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    buffers = [x for x in ins if isinstance(x, AbstractBuffer)]
    if buffers and (inner := called_by(eqn)) is not None:
        return results(inner, ins)
    if buffers and returns_operands(eqn):
        return _returned(eqn, ins[-len(eqn.outvars) :])
    if buffers and (found := buffers[0].result(eqn, ins)) is not None:
        return [found]
    return evaluated(eqn, list(map(whole, ins)))


def _returned(eqn: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
    """The operands that an equation returns, with its barrier around the values."""
    is_value = [not isinstance(x, AbstractBuffer) for x in operands]
    values = pick(operands, is_value)
    if eqn.primitive.name == "optimization_barrier" and values:
        values = lax.optimization_barrier(values)
    return put(operands, is_value, values)
