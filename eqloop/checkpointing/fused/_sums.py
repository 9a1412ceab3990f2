"""Sums over rows, as cotangents of what rows share are: added up block by block."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._types import Value
from ._classes import Val
from ._leaves import Leaf, RowNumbers
from ._numbers import Numbers
from ._pallas import in_registers
from ._products import is_large
from ._row_programs import RowPrograms
from ._tiles import padded
from ._tpu import shape_of


class Summed(NamedTuple):
    """An output of the way back.

    Attributes:
        of_step: It, at one step.
        leaf: How it lies in memory, one entry for each block or row if it is a sum.
        over: The axes of rows over which it is added up, as axes of the leaf's array.
        by_block: Whether there is one entry for each block.
    """

    of_step: Val
    leaf: Leaf
    over: tuple[int, ...]
    by_block: bool

    @classmethod
    def of(
        cls, of: RowPrograms, val: Val, dtype: Any, time: tuple[int, int] | None = None
    ) -> "Summed":
        aval = val.aval.update(dtype=dtype)
        rows = of.rows(val)
        if not val.pending:
            return cls(val, Leaf.of(aval, rows, time), (), False)
        own = [r for r in rows if r is not None]
        # In tiles, XLA adds them up.
        if not own and not of.is_tiled:
            # Added up within a block, which has an axis of blocks in front.
            aval = aval.update(shape=(of.blocks, *aval.shape))
            at = time and (time[0] + 1, time[1])
            leaf = Leaf.of(aval, [-1, *rows], at)
            return cls(val, leaf, (0,), True)
        more = [i for i in range(len(of.found.sizes)) if i not in own]
        sizes = [of.found.sizes[i] for i in more]
        aval = aval.update(shape=(*sizes, *aval.shape))
        at = time and (time[0] + len(more), time[1])
        leaf = Leaf.of(aval, [*more, *rows], at)
        return cls(val, leaf, tuple(range(len(more))), False)

    def zeros(self, of: RowPrograms) -> list[Value]:
        """What is carried before the first term."""
        zeros = in_registers(jnp.zeros(shape_of(of.block), self.leaf.number))
        return [zeros] * of.leaf(self.of_step).count

    def added(
        self, of: RowPrograms, numbers: Numbers, total: list[Value], array: np.ndarray
    ) -> list[Value]:
        """What is carried after another term."""
        values = of.vectors(array, self.of_step, self.leaf.dtype)
        return [t + v for t, v in zip(total, values, strict=True)]

    def write(
        self, ref: Any, rows: RowNumbers, values: Sequence[Value], time: Any = None
    ) -> None:
        if not self.by_block:
            self.leaf.write(ref, rows, values, time)
            return
        there = rows.are_there
        for k, value in enumerate(values):
            if there is not None:
                value = jnp.where(there, value, jnp.zeros_like(value))
            index = list(self.leaf.at(_OfBlock(rows), k, time))
            ref[tuple(index)] = jnp.sum(value).astype(self.leaf.number)

    def total(self, x: Value) -> Value:
        """The sum, from what the kernel has written."""
        x = self.leaf.closed(x)
        return jnp.sum(x, self.over) if self.over else x


class Matrix(NamedTuple):
    """A sum of products of two vectors over steps and rows, in a tile of each block.

    Attributes:
        of_step: It, at one step.
        blocks: How many blocks there are.
    """

    of_step: Val
    blocks: int

    @property
    def leaf(self) -> jax.ShapeDtypeStruct:
        m, n = map(padded, self.of_step.shape)
        return jax.ShapeDtypeStruct((self.blocks, m, n), self.of_step.aval.dtype)

    def zeros(self, of: RowPrograms) -> Value:
        return jnp.zeros(self.leaf.shape[1:], self.leaf.dtype)

    def added(
        self, of: RowPrograms, numbers: Numbers, total: Value, array: np.ndarray
    ) -> Value:
        return total + numbers.outer(array, self.leaf.dtype)

    def write(self, ref: Any, rows: RowNumbers, total: Value) -> None:
        m, n = total.shape
        index = [lax.broadcasted_iota(np.dtype("int32"), (m, n), i) for i in range(2)]
        ref[(jnp.full((m, n), rows.number, np.dtype("int32")), *index)] = total

    def total(self, x: Value) -> Value:
        m, n = self.of_step.shape
        return jnp.sum(x, 0)[:m, :n]


def is_matrix(out: Summed, room: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether a sum may be one of products of two vectors, in a tile."""
    val, shape = out.of_step, out.of_step.shape
    return (
        out.by_block
        and len(shape) == 2
        and is_large(*shape, 1)
        and len(room) > 0
        and room[0].dtype == out.leaf.dtype == val.aval.dtype
        and padded(max(shape)) <= room[0].shape[0]
    )


@dataclasses.dataclass
class _OfBlock:
    """Stands for the rows of a block where they are added up."""

    rows: RowNumbers

    def index(self, first: int, last: int | None) -> Value:
        return self.rows.number
