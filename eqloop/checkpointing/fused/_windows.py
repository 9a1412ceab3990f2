"""Gathers and scatters as one: parts of an operand, at places that are computed.

A gather reads these parts, and a scatter writes them. JAX has another name for the same
numbers in each of the two.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax import lax

Axes = tuple[int, ...]


class Windows(NamedTuple):
    """The axes of the operand, of the indices, and of the parts.

    Attributes:
        dropped: Axes of the operand that the parts do not have.
        operand_batch: Axes of the operand that go along with the indices.
        index_batch: The axes of the indices that they go along with.
        own: The axes of the parts that are those of the operand.
        starts: The axes of the operand that the indices are for.
    """

    dropped: Axes
    operand_batch: Axes
    index_batch: Axes
    own: Axes
    starts: Axes

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> "Windows":
        """Those of a gather, or of a scatter."""
        d = params["dimension_numbers"]
        batch = d.operand_batching_dims
        if isinstance(d, lax.GatherDimensionNumbers):
            of_indices = d.start_indices_batching_dims
            own, starts = d.offset_dims, d.start_index_map
            return cls(d.collapsed_slice_dims, batch, of_indices, own, starts)
        of_indices = d.scatter_indices_batching_dims
        own, starts = d.update_window_dims, d.scatter_dims_to_operand_dims
        return cls(d.inserted_window_dims, batch, of_indices, own, starts)

    @property
    def batch(self) -> list[tuple[int, int]]:
        """Pairs of an axis of the operand and one of the indices."""
        return list(zip(self.operand_batch, self.index_batch, strict=True))

    def kept(self, ndim: int) -> list[int]:
        """The axes of an operand of so many that are axes of the parts."""
        gone = {*self.dropped, *self.operand_batch}
        return [i for i in range(ndim) if i not in gone]

    def of_indices(self, ndim: int) -> list[int]:
        """The axes of the parts, of so many, that are those of the indices."""
        return [j for j in range(ndim) if j not in self.own]
