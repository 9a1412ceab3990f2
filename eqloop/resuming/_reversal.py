"""Takes cotangents back through the segments of a loop, the last one first."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    Axis,
    cast_like,
    chosen_sum_type,
    is_narrow,
    pick,
    put,
    split,
    sum_dtype,
)
from .._types import Value
from ._open_run import OpenedRun
from ._segment_call import Wanted
from ._sources import StoredSource
from ._state_folder import StateFolder, placed, sharding_of
from ._status import COTANGENTS, OF_SCANNED
from ._sweep import SegmentSweep, row_files


@dataclasses.dataclass(frozen=True, eq=False)
class Reversal:
    """The way back through a loop, all of whose carries are stored.

    Attributes:
        last: The cotangents of the inexact arrays of the last carry.
        ys: Those of the inexact arrays that the steps returned; `None` for zeros.
    """

    run: OpenedRun
    wanted: Wanted
    last: list[Value]
    ys: list[Value]

    @functools.cached_property
    def sweep(self) -> SegmentSweep:
        """Its states are the cotangents of the carry, and sums of what all share."""
        carry, inputs = self.run.call.carry, self.run.call.inputs
        names = inputs.of_arrays(lambda source: source.form.names)
        start = [*self.last, *self._zeros()]
        states = StateFolder(
            self.run.directory / COTANGENTS,
            [*pick(carry.names, carry.inexact), *pick(names, self.wanted.shared)],
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in start],
            list(map(sharding_of, start)),
        )
        types, _ = inputs.types(inputs.segments.length)
        rows = row_files(self.run.directory / OF_SCANNED, pick(types, self.wanted.own))
        axes = pick(inputs.of_arrays(lambda source: source.axes), self.wanted.own)
        given = (
            inputs,
            start,
            states,
            rows,
            axes,
            (StoredSource(self.ys, "ys", self._y_axes),),
        )
        return SegmentSweep(self._reversed, *given, is_back=True)

    @property
    def result(self) -> tuple[list[Value], list[Value], list[Value]]:
        """The cotangents of the first carry, of the scan and of `xs`."""
        before, sums = split(self.sweep.result, len(self.last))
        none = [None] * len(self.wanted.own)
        own = [file.read() for file in self.sweep.rows]
        shared = list(map(cast_like, sums, self._shared))
        found = put(none, self.wanted.own, own)
        found = put(found, self.wanted.shared, shared)
        return before, *split(found, len(self.run.call.inputs.scan.form.types))

    @property
    def sums_in_words(self) -> dict[str, str]:
        """In which type sums are kept, if that is not the type of each array."""
        sums = chosen_sum_type()
        is_wide = any(is_narrow(x, sums) for x in self._shared)
        return {"sums": str(sums)} if is_wide else {}

    def _reversed(
        self, k: int, state: list[Value], arrays: Value, beside: Value, ys: Value
    ) -> tuple[list[Value], list[Value]]:
        """Reverses a segment."""
        call, forward = self.run.call, self.run.forward
        wanted = self.wanted._replace(shardings=tuple(self.sweep.states.shardings))
        given = [ct is not None for ct in self.ys]
        ct_ys = put([None] * len(given), given, self._of_segment(k, ys))
        ct_carry, sums = split(state, len(self.last))
        inputs = arrays, forward.state_at(forward.before(k)), beside
        about = self.run.segments.size(k), wanted, inputs, (ct_carry, ct_ys), sums
        ct_carry, sums, rows = call.reverse_program(*about)
        return [*ct_carry, *sums], rows

    @property
    def _y_axes(self) -> list[Axis]:
        """For each of the cotangents of `ys` the axis that is cut into segments."""
        axes = pick(self.run.call.y_axes, self.run.call.ys.inexact)
        pairs = zip(self.ys, axes, strict=True)
        return [None if ct is None else axis for ct, axis in pairs]

    def _of_segment(self, k: int, ys: Sequence[Value]) -> list[Value]:
        """The cotangents that segment `k` gets, of those that are not zero."""
        # What is the same for all steps was returned once: it is the last segment's.
        axes = pick(self._y_axes, [ct is not None for ct in self.ys])
        is_last = k == len(self.run.segments) - 1
        return [
            ct if is_last or axis is not None else jnp.zeros_like(ct)
            for ct, axis in zip(ys, axes, strict=True)
        ]

    @functools.cached_property
    def _shared(self) -> list[Value]:
        """What all segments share, of what cotangents are wanted of."""
        arrays = self.run.call.inputs.of_arrays(lambda source: source.whole)
        return pick(arrays, self.wanted.shared)

    def _zeros(self) -> list[Value]:
        """The sums before anything was added."""
        sums, shared = chosen_sum_type(), self._shared
        zeros = [np.zeros(x.shape, sum_dtype(x.dtype, sums)) for x in shared]
        return [placed(z, sharding_of(x)) for z, x in zip(zeros, shared, strict=True)]
