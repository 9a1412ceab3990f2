"""Kernels of panels, by Pallas's backend Mosaic GPU on Hopper."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import pick, split
from ..._types import Index, Value
from ._leaves import Axis, Leaf, RowNumbers
from ._pallas import NAME, interpreted_by_mosaic, launched
from ._panel_block import PanelBlock, parts_of
from ._panel_rooms import ROWS, PanelRooms
from ._panels import NARROW, Panel

_FLOAT = np.dtype("float32")


class PanelLoop(PanelRooms):
    """A loop of steps by panels, as a kernel."""

    def prepared(self, inputs: Sequence[Value | None]) -> tuple[Any, list[Value]]:
        """What is known of the inputs, as the kernel takes it: of rows, and shared."""
        of_rows = {
            i: self._opened(i, x)
            for i in self.own_inputs
            if (x := inputs[i]) is not None
        }
        return of_rows, self.shared(inputs)

    def shared(self, inputs: Sequence[Value]) -> list[Value]:
        """What rows share, as the kernel takes it."""
        none = [jnp.int32(0)] * len(self.of.found.roots)
        inputs = [*inputs, *none, *self.of.lifted_values]
        wanted = [*self.same, *(factor.matrix.var for factor, _ in self.matrices)]
        found = self.panels.before(inputs, wanted)
        same, matrices = split(found, len(self.same))
        # The last panel of a vector has no units in some of its columns.
        more = self.groups * self.tile
        made = [_fit(x.reshape(-1), x.size + more) for x in same]
        for x, (factor, count) in zip(matrices, self.matrices, strict=True):
            (i, j), (a, b) = factor.starts, factor.sizes
            x = jnp.squeeze(x)[i : i + a, j : j + b].astype(_FLOAT)
            made += parts_of(_fit(x, self.padded(a), self.padded(b)), count)
        return made

    def __call__(
        self,
        inputs: Sequence[Value],
        first: Index,
        steps: int,
        stored: Sequence[tuple[int, int]] = (),
        held: Sequence[bool] = (),
        slots: int = 0,
        prepared: Any = None,
    ) -> tuple[list[Value], dict[Panel, Value], list[Value]]:
        """Runs steps from the `first` on: the carry, what is written, stored carries.

        Carries are `stored` before segments, so many of so many steps each. Some inputs
        may be `prepared` before.
        """
        from jax.experimental.pallas import mosaic_gpu as gpu

        found, interpret = self.of.found, self.of.settings.interpret
        numbers = jnp.stack([jnp.int32(0), jnp.asarray(first, jnp.int32)])
        leaves = {i: self._leaf(i, inputs[i]) for i in self.times}
        opened, shared = prepared or self.prepared(inputs)
        of_rows = [
            opened[i] if i in opened else self._opened(i, inputs[i])
            for i in self.own_inputs
        ]
        given = [numbers, *of_rows, *shared]
        kept = pick(self.nexts, held) if stored else []
        length = steps if self.stored else self.loop.length

        def type_of(panel: Panel, *more: int) -> jax.ShapeDtypeStruct:
            shape = (found.count, self.padded(panel.width))[: 1 + (panel.width > 1)]
            return jax.ShapeDtypeStruct((*more, *shape), panel.dtype)

        types = [type_of(p) for p in self.nexts]
        types += [type_of(p, length) for p in self.outs]
        types += [type_of(p, slots) for p in kept]
        tiles = gpu.TilingTransform((8, self.tile)), gpu.SwizzleTransform(2 * self.tile)
        # An axis of one entry has addresses computed at each step, not held all along.
        room = lambda *shape: gpu.SMEM((1, *shape), NARROW, transforms=tiles)
        matrices = [
            room(*map(self.padded, factor.sizes))
            for factor, count in self.matrices
            for _ in range(count)
        ]
        scratch = [
            matrices,
            [room(ROWS, width) for width in self.rooms(*self._room)],
            [gpu.SMEM((self.groups, ROWS), _FLOAT) for _ in self.of_kind("summed")],
            gpu.Barrier(num_arrivals=max(len(matrices), 1)),
            gpu.Barrier(num_arrivals=self.groups),
        ]
        counts = [1, *map(len, (of_rows, self.same, matrices))]
        counts += map(len, (self.nexts, self.outs, kept))

        def body(*refs: Any) -> None:
            *parts, rooms = split(refs, *counts)
            numbers = RowNumbers(found.sizes, ROWS, lax.axis_index("block"), True)
            PanelBlock(self, numbers.first, leaves, held, parts, rooms).run(
                steps, stored
            )

        body.__name__ = NAME
        run = gpu.kernel(
            body,
            out_type=types,
            scratch_types=scratch,
            grid=(-(-found.count // ROWS),),
            grid_names=("block",),
            num_threads=self.groups,
            thread_name="group",
            interpret=interpreted_by_mosaic() if interpret else None,
            compiler_params=gpu.CompilerParams(
                lowering_semantics=gpu.LoweringSemantics.Lane,
                unsafe_no_auto_barriers=True,
            ),
        )
        panels = [*self.nexts, *self.outs, *kept]
        made = [
            x[..., : p.width] if p.width > 1 else x
            for x, p in zip(launched(run, given, interpret), panels, strict=True)
        ]
        carry, outs, carries = split(made, len(self.nexts), len(self.outs))
        return carry, dict(zip(self.outs, outs, strict=True)), carries

    def _leaf(self, i: int, x: Value) -> Leaf:
        axis = self.times[i]
        return self.of.leaf(self.vals[i], axis and (axis[0], x.shape[axis[0]]))

    def _opened(self, i: int, x: Value) -> Value:
        """An input of rows, with columns for the units that panels have in memory."""
        if i in self.carried:
            width = self.nexts[i - self.carried.start].width
            shape = (self.of.found.count, width)[: 1 + (width > 1)]
            x, ends, axis = x.reshape(shape), [self.padded(width)], -1
        else:
            leaf, given = self._leaf(i, x), self.of_kind("given")
            x = leaf.opened(x)
            ends = [p.start + self.padded(p.width) for p in given if p.of == i]
            axis = next((k for k, a in enumerate(leaf.axes) if _is_units(a)), 0)
        sizes = list(x.shape)
        if max(ends, default=1) > 1:
            sizes[axis] = max(sizes[axis], *ends)
        return _fit(x, *sizes)


def _is_units(axis: Axis) -> bool:
    return axis.first is None and not axis.is_time and axis.size > 1


def joined(arrays: Sequence[Value]) -> Value:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, -1)


def _fit(x: Value, *sizes: int) -> Value:
    """An array with zeros behind, up to some sizes."""
    if x.shape == tuple(sizes):
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(sizes, x.shape, strict=True)])
