"""A block of rows in a kernel of panels, as one of its groups of warps sees it."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import pick
from ..._types import Index, Value
from ._leaves import Leaf
from ._panel_rooms import ROWS, PanelRooms
from ._panels import NARROW, Panel, Same

_FLOAT = np.dtype("float32")


def parts_of(x: Value, count: int) -> list[Value]:
    """Arrays of bfloat16 that add up to one of float32, the largest first."""
    found = [x.astype(NARROW)]
    for _ in range(count - 1):
        rest = x - found[-1].astype(_FLOAT)
        # Of an infinity, nothing is left.
        x = jnp.where(jnp.abs(rest) < jnp.inf, rest, jnp.zeros_like(rest))
        found.append(x.astype(NARROW))
    return found


class PanelBlock:
    """A block of rows, which runs the loop in the kernel."""

    def __init__(
        self,
        of: PanelRooms,
        first: Value,
        leaves: dict[int, Leaf],
        held: Any,
        refs: Any,
        rooms: Any,
    ):
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as gpu

        self.of, self.pl, self.gpu = of, pl, gpu
        (self._numbers,), own, same, sources, self._finals, self._outs, self._kept = (
            refs
        )
        matrices, operands, sums, loaded, self._barrier = rooms
        self._own = dict(zip(of.own_inputs, own, strict=True))
        self._leaves = leaves
        self._shared = dict(zip(of.same, same, strict=True))
        self._held, self._first = held, first
        self._group, self.layout = lax.axis_index("group"), gpu.Layout.WGMMA
        rest, self._operands = iter(matrices), dict[Any, list[Any]]()
        self._matrices = {
            f.key: list(itertools.islice(rest, n)) for f, n in of.matrices
        }
        rest = iter(operands)
        for level in range(of.levels + 1):
            rest = iter(operands) if of.is_shared else rest
            for x, n in of.operands(level):
                self._operands[level, x] = list(itertools.islice(rest, n))
        self._sums = dict(zip(of.of_kind("summed"), sums, strict=True))
        if matrices:

            @pl.when(self._group == 0)
            def _() -> None:
                for source, ref in zip(sources, matrices, strict=True):
                    gpu.copy_gmem_to_smem(source, ref.at[0], loaded)

            gpu.barrier_wait(loaded)

    def run(self, steps: int, stored: Sequence[tuple[int, int]]) -> None:
        self._start_step()
        carry = [
            self._load(self._own[i], self._place(panel), panel)
            for i, panel in zip(self.of.carried, self.of.nexts, strict=True)
        ]
        at = row = 0
        for count, length in stored or [(1, steps)]:
            segment = functools.partial(self._segment, (at, row), length, steps)
            carry = lax.fori_loop(0, count, segment, carry)
            at, row = at + count * length, row + count
        self._start_step()
        for ref, x, panel in zip(self._finals, carry, self.of.nexts, strict=True):
            self._write(ref, (), panel, x)

    def _segment(
        self, start: tuple[int, int], length: int, steps: int, i: Index, carry: Any
    ) -> Any:
        self._start_step()
        self._store(carry, start[1] + i)
        first = start[0] + i * length
        step = lambda j, carry: self._stepped(first + j, steps, carry)
        return lax.fori_loop(0, length, step, carry)

    def _store(self, carry: Any, row: Index) -> None:
        pairs = list(zip(carry, self.of.nexts, strict=True))
        held = pick(pairs, self._held) if self._kept else []
        for ref, (x, panel) in zip(self._kept, held, strict=True):
            self._write(ref, (row,), panel, x)

    def _start_step(self) -> None:
        """Has addresses computed for a step: a number that is zero is read again."""
        self._zero = self._numbers[0]
        self._rows = self.pl.ds(self._first + self._zero, ROWS)

    def _stepped(self, i: Index, steps: int, carry: Any) -> Any:
        """The carry after a step, of which outputs are written."""
        of, gpu = self.of, self.gpu
        self._start_step()
        self._local = steps - 1 - i if of.stored else i
        self._index = of.loop.index(self._numbers[1] + self._local)
        self._carry, self._made = dict(zip(of.carried, carry, strict=True)), {}
        at = self._local if of.stored else self._index
        for level in range(of.levels + 1):
            outs = {
                panel: ref
                for ref, panel in zip(self._outs, of.outs, strict=True)
                if panel.level == level
            }
            new, sums = dict(of.operands(level + 1)), of.of_kind("summed", level + 1)
            if of.levels == 1 and (new or sums):
                self._wait()
            later = list[tuple[Any, Value]]()
            put = later.append if of.is_shared else self._put
            # Each is written as soon as it is computed, and then takes no registers.
            for panel in dict.fromkeys([*new, *outs]):
                if panel in outs:
                    self._write(outs[panel], (at,), panel, self._value(panel))
                if panel in new:
                    columns = self._columns(0, panel.width)
                    parts = parts_of(self._masked(panel), new[panel])
                    refs = self._operands[level + 1, panel]
                    for ref, part in zip(refs, parts, strict=True):
                        put((ref.at[self._zero, :, columns], part))
            if not (new or sums):
                continue
            for panel in sums:
                totals = [
                    jnp.sum(self._masked(x), 1) if x.width > 1 else self._value(x)
                    for x in panel.panels
                ]
                ref = self._sums[panel].at[self._group]
                put((ref, functools.reduce(jnp.add, totals)))
            # Products are made where they are used, but before their operands go.
            for panel in of.of_kind("product", level):
                self._value(panel)
            if of.is_shared:
                self._wait()
            for pair in later:
                self._put(pair)
            gpu.commit_smem()
            self._wait()
            # They are read before another step writes them.
            for panel in sums:
                self._value(panel)
        return [gpu.layout_cast(self._value(p), self._layout_of(p)) for p in of.nexts]

    def _put(self, pair: tuple[Any, Value]) -> None:
        self.gpu.store(*pair, optimized=False)

    def _wait(self) -> None:
        self.gpu.barrier_arrive(self._barrier)
        self.gpu.barrier_wait(self._barrier)

    def _layout_of(self, panel: Panel) -> Any:
        return self.layout if panel.width > 1 else self.layout.reduce(1)

    def _columns(self, start: Index, width: int) -> Any:
        own = self.of.own(width)
        return self.pl.ds(start + self._group * own, own)

    def _load(self, ref: Any, index: Any, panel: Panel) -> Value:
        layout = self._layout_of(panel)
        return self.gpu.load(ref.at[index], layout=layout, optimized=False)

    def _write(self, ref: Any, index: Any, panel: Panel, x: Value) -> None:
        x = self.gpu.layout_cast(x, self._layout_of(panel))
        ref = ref.at[(*index, *self._place(panel))]
        self.gpu.store(ref, x, optimized=False)

    def _place(self, panel: Panel) -> tuple[Any, ...]:
        """The rows of the block, and the columns of the group."""
        return (self._rows, self._columns(0, panel.width))[: 1 + (panel.width > 1)]

    def _shape(self, width: int) -> tuple[int, ...]:
        return (ROWS, self.of.own(width))[: 1 + (width > 1)]

    def _masked(self, panel: Panel) -> Value:
        """A panel with zeros where it has no units."""
        x, width = self._value(panel), panel.width
        if width == self.of.padded(width):
            return x
        at = self.gpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=self.layout)
        left = jnp.broadcast_to(width - self._group * x.shape[1], x.shape)
        return jnp.where(at < left, x, jnp.zeros_like(x))

    def _value(self, panel: Panel) -> Value:
        if panel in self._made:
            return self._made[panel]
        made = getattr(self, f"_{panel.kind}")(panel)
        # What is in memory is read again where it is used again.
        if panel.kind not in ("given", "same"):
            self._made[panel] = made
        return made

    def _given(self, panel: Panel) -> Value:
        i = panel.of
        if i in self.of.carried:
            return self._carry[i]
        time = self._local if i in self.of.stored else self._index
        columns = self._columns(panel.start, panel.width)
        index = tuple(
            time
            if axis.is_time
            else self._rows
            if axis.first is not None
            else columns
            if axis.size > 1
            else 0
            for axis in self._leaves[i].axes
        )
        return self._load(self._own[i], index, panel)

    def _same(self, panel: Panel) -> Value:
        if panel.of.is_number:
            return self._number(panel.of, panel.width)
        columns = self._columns(panel.start, panel.width)
        ref, layout = self._shared[panel.of.var].at[columns], self.layout.reduce(0)
        x = self.gpu.load(ref, layout=layout, optimized=False)
        return self._repeated(x, panel.width, 1)

    def _repeated(self, x: Value, width: int, axis: int) -> Value:
        made = lax.broadcast_in_dim(x, self._shape(width), (axis,))
        return self.gpu.layout_cast(made, self.layout)

    def _spread(self, panel: Panel) -> Value:
        return self._repeated(self._value(panel.panels[0]), panel.width, 0)

    def _mapped(self, panel: Panel) -> Value:
        ins = [
            self._number(x, panel.width) if isinstance(x, Same) else self._value(x)
            for x in panel.ins
        ]
        return panel.of.primitive.bind(*ins, **panel.of.params)

    def _number(self, x: Same, width: int) -> Value:
        is_known = x.value is not None
        value = jnp.asarray(x.value, x.dtype) if is_known else self._shared[x.var][0]
        return jnp.broadcast_to(value, self._shape(width))

    def _summed(self, panel: Panel) -> Value:
        parts = (
            self._load(self._sums[panel], (group,), panel)
            for group in range(self.of.groups)
        )
        return functools.reduce(jnp.add, parts)

    def _product(self, panel: Panel) -> Value:
        columns = self._columns(0, panel.width)

        def run(sum_: Any) -> Value:
            for x, factor in zip(panel.panels, panel.factors, strict=True):
                units = self.pl.ds(0, self.of.padded(x.width))
                left = self._operands[panel.level, x]
                right = self._matrices[factor.key]
                for i, j in _pairs(len(left), len(right)):
                    at = (slice(None), columns)[:: 1 - 2 * factor.axis]
                    part = right[j].at[self._zero, *at]
                    part = part.transpose((1, 0)) if factor.axis else part
                    self.gpu.wgmma(sum_, left[i].at[self._zero, :, units], part)
            return sum_[...]

        shape = self._shape(panel.width)
        return self.pl.run_scoped(run, self.gpu.ACC(shape, _FLOAT))


def _pairs(m: int, n: int) -> list[tuple[int, int]]:
    """The parts of two sums whose products are not too small, the smallest first."""
    every = itertools.product(range(m), range(n))
    return sorted((at for at in every if sum(at) < max(m, n)), key=lambda at: -sum(at))
