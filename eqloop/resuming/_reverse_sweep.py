"""Takes cotangents back through the segments of a loop, the last one first."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    cast_like,
    chosen_sum_type,
    is_narrow,
    pick,
    put,
    split,
    sum_dtype,
)
from .._types import Value
from ._forward_sweep import ForwardSweep, one_behind, row_files, write_rows
from ._row_file import RowFile
from ._segment_call import Wanted
from ._sources import AbstractSource, StoredSource
from ._state_folder import StateFolder, placed, sharding_of
from ._status import COTANGENTS, OF_SCANNED


@dataclasses.dataclass(frozen=True, eq=False)
class ReverseSweep:
    """The way back.

    Attributes:
        forward: The loop, all of whose carries are stored.
        last: The cotangents of the inexact arrays of the last carry.
        ys: Those of the inexact arrays that the steps returned; `None` for zeros.
        moved: Called with the number of steps that were reversed.
    """

    forward: ForwardSweep
    wanted: Wanted
    last: list[Value]
    ys: list[Value]
    moved: Callable[[int], None]

    @property
    def states(self) -> StateFolder:
        """The cotangents of the carry and the sums, by the number of steps left."""
        carry = self.forward.call.carry
        scan, xs = self._sources
        _, names = self.wanted.split(self.wanted.pick(scan.form.names, xs.form.names))
        arrays = [*self.last, *self._zeros()]
        return StateFolder(
            self.forward.directory / COTANGENTS,
            [*pick(carry.names, carry.inexact), *names],
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays],
            list(map(sharding_of, arrays)),
        )

    @property
    def rows(self) -> list[RowFile]:
        """The files of the cotangents of what is scanned."""
        length = self.forward.call.segments.length
        types = self.wanted.pick(*(source.types(length) for source in self._sources))
        own, _ = self.wanted.split(types)
        return row_files(self.forward.directory / OF_SCANNED, own)

    def run(self) -> tuple[list[Value], list[Value], list[Value]]:
        """Reverses what is left."""
        segments, states = self.forward.call.segments, self.states
        is_stored = states.are_stored(map(segments.done, range(len(segments))))
        left = next((k for k, flag in enumerate(is_stored) if flag), len(segments))
        now = [*self.last, *self._zeros()]
        if left < len(segments):
            now = states.read(segments.done(left))
        axes = self.wanted.pick(*(source.axes for source in self._sources))
        own_axes, _ = self.wanted.split(axes)
        for k, new, rows in one_behind(self._computed(range(left)[::-1], now)):
            write_rows(self.rows, own_axes, segments.bounds(k)[0], rows)
            states.write(segments.done(k), new)
            now = new
            states.forget(states.steps[2:])
            self.moved(segments.length - segments.done(k))
        before, sums = split(now, len(self.last))
        shared = list(map(cast_like, sums, self._shared))
        own = [file.read() for file in self.rows]
        return before, *self.wanted.join(own, shared)

    def _computed(
        self, which: Sequence[int], now: list[Value]
    ) -> Iterator[tuple[int, list[Value], list[Value]]]:
        call, inputs = self.forward.call, self.forward.inputs
        shardings = tuple(self.states.shardings)
        wanted = dataclasses.replace(self.wanted, shardings=shardings)
        given = [ct is not None for ct in self.ys]
        read = inputs.read(which, self._source_of_ys())
        for k, (scan, xs, ys, beside) in zip(which, read, strict=True):
            carry = self.forward.carry_before(k)
            ct_ys = put([None] * len(given), given, self._of_segment(k, ys))
            ct_carry, sums = split(now, len(self.last))
            size = call.segments.size(k)
            ct_carry, sums, rows = call.reverse_program(
                size, wanted, (scan, xs, carry), beside, (ct_carry, ct_ys), sums
            )
            now = [*ct_carry, *sums]
            yield k, now, rows

    @property
    def _sources(self) -> tuple[AbstractSource, AbstractSource]:
        return self.forward.inputs.scan, self.forward.inputs.xs

    def _source_of_ys(self) -> StoredSource:
        """The cotangents of what the steps returned, to be read by segments."""
        call = self.forward.call
        axes = pick(call.y_axes, call.ys.inexact)
        pairs = zip(self.ys, axes, strict=True)
        axes = [None if ct is None else axis for ct, axis in pairs]
        return StoredSource(self.ys, "ys", axes)

    def _of_segment(self, k: int, ys: Sequence[Value]) -> list[Value]:
        """The cotangents that segment `k` gets, of those that are not zero."""
        # What is the same for all steps was returned once: it is the last segment's.
        call = self.forward.call
        axes = pick(call.y_axes, call.ys.inexact)
        axes = pick(axes, [ct is not None for ct in self.ys])
        is_last = k == len(call.segments) - 1
        return [
            ct if is_last or axis is not None else jnp.zeros_like(ct)
            for ct, axis in zip(ys, axes, strict=True)
        ]

    @property
    def _shared(self) -> list[Value]:
        """What all segments share, of what cotangents are wanted of."""
        arrays = self.wanted.pick(*(source.whole() for source in self._sources))
        return self.wanted.split(arrays)[1]

    @property
    def sums_in_words(self) -> dict[str, str]:
        """In which type sums are kept, if that is not the type of each array."""
        sums = chosen_sum_type()
        is_wide = any(is_narrow(x, sums) for x in self._shared)
        return {"sums": str(sums)} if is_wide else {}

    def _zeros(self) -> list[Value]:
        """The sums before anything was added."""
        sums, shared = chosen_sum_type(), self._shared
        zeros = [np.zeros(x.shape, sum_dtype(x.dtype, sums)) for x in shared]
        return [placed(z, sharding_of(x)) for z, x in zip(zeros, shared, strict=True)]
