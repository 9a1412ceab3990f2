"""Kernels of panels, by Pallas's backend Mosaic GPU on Hopper."""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import Arrays, Flags, pick, split
from ..._types import Value
from ..engine.orders._levels import Nest
from ._pallas import NAME, launched
from ._panel_block import PanelBlock, parts_of
from ._panel_rooms import ROWS, TILE, TURNS, PanelRooms, Total
from ._panels import NARROW, Panel

_FLOAT = np.dtype("float32")


class PanelLoop(PanelRooms):
    """A loop of steps by panels, as a kernel."""

    def __call__(
        self,
        inputs: Sequence[Value],
        nests: Sequence[Nest],
        held: Flags = (),
        slots: int = 0,
        stored: Arrays = (),
    ) -> tuple[list[Value], dict[Panel, Value], list[Value], dict[Total, Value]]:
        """Runs the loop: the carry, what is written, stored carries, and totals.

        Those that are `held` are stored before the segments of nests. Steps are taken
        back from `stored` ones.
        """
        from jax.experimental.pallas import mosaic_gpu as gpu

        step, again, count = self.step, self.again, self.of.found.count
        kept = again.nexts if again else pick(step.nexts, held)
        # What is run again has the carries of one segment at a time.
        slots = max(nest.stride for nest in nests) if again else slots
        starts = zip(step.nexts, [inputs[i] for i in step.carried], strict=True)
        carries = zip(kept if again else (), stored, strict=True)
        groups = [
            [jnp.zeros(1, jnp.int32)],
            [self._opened(i, inputs[i]) for i in self.times],
            [self._of_rows(x, panel.width) for panel, x in starts],
            [self._of_rows(x, panel.width, x.shape[0]) for panel, x in carries],
            *self._shared_inputs(inputs),
        ]
        made_of = self._made_of(kept, slots)
        interpret, backend = self.of.settings.interpret, cast(Any, gpu)

        def body(*refs: Any) -> None:
            *parts, rooms = split(refs, *map(len, (*groups, *made_of)))
            block = PanelBlock(self, parts, rooms)
            block.go_back(nests, again) if again else block.run(nests, held)

        body.__name__ = NAME
        run = gpu.kernel(
            body,
            out_type=[t for types in made_of for t in types],
            scratch_types=self._scratch(gpu),
            grid=(self.blocks,),
            grid_names=("block",),
            num_threads=self.groups,
            thread_name="group",
            interpret=backend.InterpretGPUParams() if interpret else None,
            compiler_params=gpu.CompilerParams(
                lowering_semantics=gpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,
            ),
        )
        made = launched(run, [x for group in groups for x in group], interpret)
        *made, totals = split(made, *map(len, made_of[:-1]))
        carry, outs, carries = (
            [
                x[..., :count, : p.width] if p.width > 1 else x[..., :count]
                for p, x in of
            ]
            for of in map(zip, (step.nexts, step.outs, kept), made)
        )
        # Blocks are added up in the same order in every run.
        totals = dict(zip(self.totals, (jnp.sum(x, 0) for x in totals), strict=True))
        found = {total: totals[n][i] for total, (n, i) in self.places.items()}
        return carry, dict(zip(step.outs, outs, strict=True)), carries, found

    def _made_of(self, kept: Sequence[Panel], slots: int) -> list[list[Any]]:
        """The types of the carry, of what is written, of stored carries, of totals."""

        def type_of(panel: Panel, *more: int) -> jax.ShapeDtypeStruct:
            shape = (self.rows, self.padded(panel.width))[: 1 + (panel.width > 1)]
            return jax.ShapeDtypeStruct((*more, *shape), panel.dtype)

        return [
            [type_of(p) for p in self.step.nexts],
            [type_of(p, self.loop.length) for p in self.step.outs],
            [type_of(p, slots) for p in kept],
            [
                jax.ShapeDtypeStruct((self.blocks, many, *_shape(n)), _FLOAT)
                for n, (many, _) in self.totals.items()
            ],
        ]

    def _scratch(self, gpu: Any) -> list[Any]:
        """What a block has in shared memory, see `PanelBlock`."""

        # An axis of one entry has addresses computed at each step, not held all along.
        def room(tile: int, dtype: Any, *shape: int) -> Any:
            swizzle = gpu.SwizzleTransform(tile * dtype.itemsize)
            transforms = gpu.TilingTransform((8, tile)), swizzle
            return gpu.SMEM(shape, dtype, transforms=transforms)

        wide = functools.partial(room, TILE, NARROW, 1)
        matrices = [
            [wide(*map(self.padded, factor.sizes))] * self.parts_of(factor.matrix)
            for factor in self.factors
        ]
        # Each group of warps has places of its own, in turns.
        turns = self.groups * TURNS * self.most_parts * bool(self.streamed)
        copied = [
            room(TILE, NARROW, turns, self.depth, self.span),
            gpu.Barrier(num_barriers=turns),
        ][: 2 * bool(turns)]
        operands = [
            [wide(ROWS, self.padded(width))] * self.parts_of(x)
            for x, width in self.operands.items()
        ]
        # In tiles of 8 x 8, all numbers of a thread are equally far from its first one.
        totals = [
            room(8, _FLOAT, near, *_shape(n))
            if n > 1
            else gpu.SMEM((near, ROWS), _FLOAT)
            for n, (_, near) in self.totals.items()
            if near
        ]
        return [
            matrices,
            copied,
            operands,
            [wide(ROWS, TILE)] * bool(self.totals),
            [gpu.SMEM((self.groups, ROWS), _FLOAT) for _ in self.of_kind("summed")],
            totals,
            gpu.Barrier(num_arrivals=max(sum(map(len, matrices)), 1)),
            gpu.Barrier(num_arrivals=self.groups),
        ]

    def _shared_inputs(self, inputs: Sequence[Value]) -> tuple[list[Value], ...]:
        """What rows share, as the kernel takes it: vectors, and parts of matrices."""
        none = [jnp.int32(0)] * len(self.of.found.roots)
        inputs = [*inputs, *none, *self.of.lifted_values]
        factors = [*self.factors, *self.streamed.values()]
        wanted = [*self.same, *(factor.matrix.var for factor in factors)]
        same, matrices = split(self.panels.before(inputs, wanted), len(self.same))
        # The last panel of a vector may have no units in some of its columns.
        panels = self.of_kind("same")
        ends = (
            [p.start + self.padded(p.width) for p in panels if p.of.var is var]
            for var in self.same
        )
        same = [
            _fit(x.reshape(-1), max([x.size, *of]))
            for x, of in zip(same, ends, strict=True)
        ]
        parts = list[Value]()
        for k, (x, factor) in enumerate(zip(matrices, factors, strict=True)):
            (i, j), (a, b) = factor.starts, factor.sizes
            n = factor.sizes[1 - factor.axis]
            x = jnp.squeeze(x)[i : i + a, j : j + b].astype(_FLOAT)
            x = _fit(x, self.padded(a), self.padded(b))
            if k >= len(self.factors):
                # It is copied by as many columns for each group as any has, and is
                # multiplied along its first axis.
                x = x.T if factor.axis else x
                x = _fit(x, len(x), self.span - self.own(n) + self.padded(n))
            parts += parts_of(x, self.parts_of(factor.matrix), _rounded)
        return same, parts

    def _of_rows(self, x: Value, width: int, *steps: int, least: int = 0) -> Value:
        """What rows have, maybe of some steps, with columns as there are in memory."""
        columns = [max(self.padded(width), least)] if width > 1 else []
        x = x.reshape(*steps, self.of.found.count, *[width][: width > 1])
        return _fit(x, *steps, self.rows, *columns)

    def _opened(self, i: int, x: Value) -> Value:
        """An input of rows, of which panels may be parts."""
        width, steps = math.prod(self.vals[i].shape) // self.of.found.count, list[int]()
        if (axis := self.times[i]) is not None:
            x, steps = jnp.moveaxis(x, axis, 0), [x.shape[axis]]
        given = [p for p in self.of_kind("given") if p.of == i]
        ends = (p.start + self.padded(p.width) for p in given)
        return self._of_rows(x, width, *steps, least=max(ends, default=0))


def _shape(columns: int) -> tuple[int, ...]:
    """The shape of a total."""
    return (ROWS, columns)[: 1 + (columns > 1)]


def _rounded(x: Value) -> Value:
    """Numbers of float32 that bfloat16 has.

    XLA takes a conversion there and back for none, by `xla_allow_excess_precision`.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def joined(arrays: Sequence[Value]) -> Value:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, -1)


def _fit(x: Value, *sizes: int) -> Value:
    """An array with zeros behind, up to some sizes."""
    if x.shape == tuple(sizes):
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(sizes, x.shape, strict=True)])
