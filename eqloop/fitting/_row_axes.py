"""How rows lie in the operations of a program."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.extend.core as jex
import numpy as np

from .._compat import form_of
from .._programs import aval_of, formula_of
from ..checkpointing import AxisMap, OpenStep, axis_maps


@dataclasses.dataclass(frozen=True)
class RowAxis:
    """Where the rows of an array lie.

    Attributes:
        axis: The axis.
        entries: How many of its entries, one after the other, are of one row.
        repeats: How often all rows lie along it, one time after the other.
    """

    axis: int
    entries: int = 1
    repeats: int = 1

    def size(self, count: int) -> int:
        """How long the axis is with so many rows."""
        return self.repeats * count * self.entries


@dataclasses.dataclass(frozen=True)
class Laid:
    """How the rows of an operation lie.

    Attributes:
        ins: In each operand; `None` if all of it is read for each row.
        outs: In each result; `None` if it is a sum over rows.
        column: Of a gather: which of the indices is the number of the row itself.
    """

    ins: tuple[RowAxis | None, ...]
    outs: tuple[RowAxis | None, ...]
    column: int | None = None


class NotByRowsError(Exception):
    """Raised where an operation does something else to fewer rows."""


# An operand, or a result, of an operation: `(0, 2)` is the third operand.
Place = tuple[int, int]


class Layouts:
    """How rows lie in the operations of a program, once they do in one of its values.

    Attributes:
        length: How many rows there are.
        maps: The axes along which each operation is a map, by its identity.
        known: A column of an operand, if it depends on no input and is a small one.
    """

    def __init__(
        self,
        length: int,
        maps: dict[int, tuple[jex.JaxprEqn, list[AxisMap]]],
        known: Callable[[Any, int], np.ndarray | None],
    ):
        self.length, self._maps, self._known = length, maps, known

    def of(self, eqn: jex.JaxprEqn, place: Place, rows: RowAxis) -> Laid | None:
        """How they lie in an operation if they lie like this in one of its values."""
        if formula_of(eqn) is not None and OpenStep.of(eqn) is None:
            return None
        if id(eqn) not in self._maps:
            self._maps[id(eqn)] = eqn, axis_maps(eqn)
        side, n = place
        at = lambda axis: axis if axis is None else dataclasses.replace(rows, axis=axis)
        for found in self._maps[id(eqn)][1]:
            if (found.ins, found.outs)[side][n] == rows.axis:
                return Laid(tuple(map(at, found.ins)), tuple(map(at, found.outs)))
        if form_of(eqn) == "reshape":
            return self._reshaped(eqn, side, rows)
        return self._numbered(eqn, place, rows) if form_of(eqn) == "gather" else None

    def _reshaped(self, eqn: jex.JaxprEqn, side: int, rows: RowAxis) -> Laid | None:
        """Rows along an axis that is divided, or joined with others."""
        shapes = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
        if eqn.params["dimensions"] is not None or eqn.params["sharding"] is not None:
            return None
        other = shapes[1 - side]
        before = math.prod(shapes[side][: rows.axis]) * rows.repeats
        for axis, size in enumerate(other):
            repeats, rest = divmod(before, math.prod(other[:axis]) or 1)
            if not rest and repeats and size % (repeats * self.length) == 0 < size:
                found = RowAxis(axis, size // (repeats * self.length), repeats)
                pair = (rows, found) if side == 0 else (found, rows)
                return Laid(pair[:1], pair[1:])
        return None

    def _numbered(self, eqn: jex.JaxprEqn, place: Place, rows: RowAxis) -> Laid | None:
        """Row `i` of an array at index `i`: the diagonal of a matrix, for example."""
        numbers, (array, indices) = eqn.params["dimension_numbers"], eqn.invars[:2]
        index_map, is_kept = numbers.start_index_map, numbers.operand_batching_dims
        if is_kept or aval_of(indices).ndim != 2 or rows.repeats > 1:
            return None
        out = next(
            i
            for i in range(aval_of(eqn.outvars[0]).ndim)
            if i not in numbers.offset_dims
        )
        for column, axis in enumerate(index_map):
            at = lambda axis: RowAxis(axis, rows.entries)
            of = Laid((at(axis), at(0)), (at(out),), column)
            is_of = (of.ins, of.outs)[place[0]][place[1]] == rows
            if is_of and axis in numbers.collapsed_slice_dims:
                found = self._known(indices, column)
                size = self.length * rows.entries
                if found is None or aval_of(array).shape[axis] != size:
                    continue
                if np.array_equal(found, np.arange(size)):
                    return of
        return None
