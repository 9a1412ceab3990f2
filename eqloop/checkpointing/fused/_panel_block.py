"""A block of rows in a kernel of panels, as one of its groups of warps sees it."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import Flags, pick, split
from ..._types import Index, Value
from ..engine.orders._levels import Nest
from ._panel_rooms import ROWS, TILE, TURNS, PanelRooms, PanelStep, Total
from ._panels import NARROW, Factor, Panel, Same

_FLOAT = np.dtype("float32")
# By what numbers of a row become one, and what changes nothing then.
_REDUCTIONS: dict[str, tuple[Any, Any, float]] = {
    "reduce_sum": (jnp.sum, lax.add, 0),
    "reduce_max": (jnp.max, lax.max, -np.inf),
    "reduce_min": (jnp.min, lax.min, np.inf),
}


def parts_of(
    x: Value, count: int, rounded: Callable[[Value], Value] = lambda x: x
) -> list[Value]:
    """Arrays of bfloat16 that add up to one of float32, the largest first.

    It is `rounded` before each is one of that type.
    """
    found = [rounded(x).astype(NARROW)]
    for _ in range(count - 1):
        rest = x - found[-1].astype(_FLOAT)
        # Of an infinity, nothing is left.
        x = jnp.where(jnp.abs(rest) < jnp.inf, rest, jnp.zeros_like(rest))
        found.append(rounded(x).astype(NARROW))
    return found


class PanelBlock:
    """A block of rows, which runs the loop in the kernel."""

    def __init__(self, of: PanelRooms, refs: Any, rooms: Any):
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as gpu

        self.of, self.pl, self.gpu = of, pl, gpu
        (self._numbers,), own, self._start, self._stored, same, sources, *outs = refs
        self._finals, self._outs, self._kept, totals = outs
        matrices, self._copied, operands, self._ones, *rooms = rooms
        sums, near, loaded, self._barrier = rooms
        self._own = dict(zip(of.times, own, strict=True))
        self._shared = dict(zip(of.same, same, strict=True))
        self._group, self._block = lax.axis_index("group"), lax.axis_index("block")
        self.layout = gpu.Layout.WGMMA
        keys = (factor.key for factor in of.factors)
        self._matrices = dict(zip(keys, matrices, strict=True))
        stay, rest = split(sources, sum(map(len, matrices)))
        counts = (of.parts_of(factor.matrix) for factor in of.streamed.values())
        self._streamed = dict(zip(of.streamed, split(rest, *counts)[:-1], strict=True))
        self._operands = dict(zip(of.operands, operands, strict=True))
        self._sums = dict(zip(of.of_kind("summed"), sums, strict=True))
        self._totals = dict(zip(of.totals, totals, strict=True))
        inside = [n for n, (_, count) in of.totals.items() if count]
        self._near = dict(zip(inside, near, strict=True))
        if matrices:

            @pl.when(self._group == 0)
            def _() -> None:
                parts = (ref for refs in matrices for ref in refs)
                for source, ref in zip(stay, parts, strict=True):
                    gpu.copy_gmem_to_smem(source, ref.at[0], loaded)

            gpu.barrier_wait(loaded)

    def run(self, nests: Sequence[Nest], held: Flags) -> None:
        """Runs the loop, and stores what is `held` before the segments of nests."""
        step = self.of.step
        of_held = lambda values: pick(values, held) if self._kept else []

        def segment(i: Index, carry: Any) -> Any:
            self._write_carry(self._kept, of_held(step.nexts), of_held(carry), i)
            first, steps = _segment(nests, i)
            each = lambda j, carry: self._stepped(step, first + j, carry)
            return lax.fori_loop(0, steps, each, carry)

        carry = self._loaded(self._start, step.nexts)
        carry = lax.fori_loop(0, _rows(nests), segment, carry)
        self._write_carry(self._finals, step.nexts, carry)

    def go_back(self, nests: Sequence[Nest], again: PanelStep) -> None:
        """Runs each segment again, the last one first, and takes its steps back."""
        step, count = self.of.step, _rows(nests)

        def segment(i: Index, going: Any) -> Any:
            row = count - 1 - i
            first, steps = _segment(nests, row)

            def forth(j: Index, carry: Any) -> Any:
                self._write_carry(self._kept, again.nexts, carry, j)
                return self._stepped(again, first + j, carry)

            def back(j: Index, going: Any) -> Any:
                local = steps - 1 - j
                return self._stepped(step, first + local, going, local)

            carry = self._loaded(self._stored, again.nexts, row)
            carry = lax.fori_loop(0, steps - 1, forth, carry)
            self._write_carry(self._kept, again.nexts, carry, steps - 1)
            return lax.fori_loop(0, steps, back, going)

        self._renew()
        self._start_totals()
        going = self._loaded(self._start, step.nexts)
        going = lax.fori_loop(0, count, segment, going)
        self._write_carry(self._finals, step.nexts, going)
        self._write_totals()

    def _loaded(self, refs: Any, panels: Sequence[Panel], *slot: Index) -> list[Value]:
        self._renew()
        return [
            self._load(ref, (*slot, *self._place(panel)), panel)
            for ref, panel in zip(refs, panels, strict=True)
        ]

    def _write_carry(
        self, refs: Any, panels: Sequence[Panel], carry: Any, *slot: Index
    ) -> None:
        self._renew()
        for ref, panel, x in zip(refs, panels, carry, strict=True):
            self._write(ref, slot, panel, x)

    def _renew(self) -> None:
        """Has addresses computed again, which else take registers all along.

        A number that is zero is read again.
        """
        self._zero = self._numbers[0]
        self._rows = self.pl.ds(self._block * ROWS + self._zero, ROWS)

    def _stepped(
        self, step: PanelStep, position: Index, carry: Any, local: Index = 0
    ) -> Any:
        """The carry after a step, of which outputs are written."""
        self._renew()
        self._index, self._local = self.of.loop.index(position), local
        self._carry, self._made = dict(zip(step.carried, carry, strict=True)), {}
        outs = dict(zip(step.outs, self._outs, strict=False))
        # What is in shared memory was read by all groups.
        if step.operands or step.of_kind("summed"):
            self._wait()
        for level in range(step.levels + 1):
            sums, here = step.of_kind("summed", level + 1), [*step.operands, *outs]
            here = [p for p in dict.fromkeys(here) if p.level == level]
            # Each is written as soon as it is computed, and then takes no registers.
            for panel in here:
                if panel in outs:
                    self._write(outs[panel], (self._index,), panel, self._value(panel))
                if panel in step.operands:
                    self._put_parts(panel)
            for panel in sums:
                along, both, zero = _REDUCTIONS[panel.of]
                totals = [
                    along(self._masked(x, zero), 1) if x.width > 1 else self._value(x)
                    for x in panel.panels
                ]
                ref = self._sums[panel].at[self._group]
                self._put(ref, functools.reduce(both, totals))
            if sums or any(panel in step.operands for panel in here):
                self.gpu.commit_smem()
                self._wait()
        made = [
            self.gpu.layout_cast(self._value(p), self._layout_of(p.width))
            for p in step.nexts
        ]
        if step.totals:
            self._each_total(self._add)
        return made

    def _put_parts(self, panel: Panel) -> None:
        """Leaves a panel where products read it."""
        self._renew()
        refs, columns = self._operands[panel], self._columns(0, panel.width)
        parts = parts_of(self._masked(panel), len(refs))
        for ref, part in zip(refs, parts, strict=True):
            self._put(ref.at[self._zero, :, columns], part)

    def _each_total(self, do: Callable[[Total, Any], None]) -> None:
        """Does something to each total, in the group of warps whose it is."""
        for k, total in enumerate(self.of.step.totals):
            n, i = self.of.places[total]
            is_near, at = i < self.of.totals[n][1], i + self._zero
            far = self._totals[n].at[self._block, at]
            refs = (self._near[n].at[at], far) if is_near else (far,)

            @self.pl.when(self._group == k % self.of.groups)
            def _(total: Total = total, refs: Any = refs) -> None:
                before = self._zero, self._rows
                self._renew()
                do(total, refs)
                self._zero, self._rows = before

    def _start_totals(self) -> None:
        def start(total: Total, refs: Any) -> None:
            n = self.of.places[total][0]
            shape, layout = (ROWS, n)[: 1 + (n > 1)], self._layout_of(n)
            self._put(refs[0], self.gpu.layout_cast(jnp.zeros(shape, _FLOAT), layout))

        self._each_total(start)
        if self._ones:

            @self.pl.when(self._group == 0)
            def _() -> None:
                x = jnp.full((ROWS, TILE), 1 / TILE, NARROW)
                x = self.gpu.layout_cast(x, self.layout)
                self._put(self._ones[0].at[0], x)

    def _add(self, total: Total, refs: Any) -> None:
        n, (ref, *_) = self.of.places[total][0], refs
        # By columns for which there are registers.
        for first in range(0, n, ROWS):
            size = min(n - first, ROWS)
            columns = self.pl.ds(first, size if n > 1 else TILE)
            x = self._outer(total, columns)
            # A vector was multiplied by columns that are all the same.
            x, of = (x, ref.at[:, columns]) if n > 1 else (jnp.sum(x, 1), ref)
            before = self.gpu.load(of, layout=self._layout_of(n), optimized=False)
            self._put(of, before + x)

    def _outer(self, total: Total, columns: Any) -> Value:
        """Some columns of what a step adds to a total."""

        def run(sum_: Any) -> Any:
            for left, start, right in total.pairs:
                units = self.pl.ds(start, ROWS)
                lefts = self._operands[left]
                rights = self._ones if right is None else self._operands[right]
                for i, j in _pairs(len(lefts), len(rights)):
                    part = lefts[i].at[self._zero, :, units].transpose((1, 0))
                    self.gpu.wgmma(sum_, part, rights[j].at[self._zero, :, columns])
            return sum_[...]

        return self.pl.run_scoped(run, self.gpu.ACC((ROWS, columns.size), _FLOAT))

    def _write_totals(self) -> None:
        def write(total: Total, refs: Any) -> None:
            n = self.of.places[total][0]
            if len(refs) > 1:
                layout = self._layout_of(n)
                x = self.gpu.load(refs[0], layout=layout, optimized=False)
                self._put(refs[1], x)

        self._each_total(write)

    def _put(self, ref: Any, x: Value) -> None:
        self.gpu.store(ref, x, optimized=False)

    def _wait(self) -> None:
        self.gpu.barrier_arrive(self._barrier)
        self.gpu.barrier_wait(self._barrier)

    def _layout_of(self, width: int) -> Any:
        return self.layout if width > 1 else self.layout.reduce(1)

    def _columns(self, start: Index, width: int) -> Any:
        own = self.of.own(width)
        return self.pl.ds(start + self._group * own, own)

    def _load(self, ref: Any, index: Any, panel: Panel) -> Value:
        layout = self._layout_of(panel.width)
        return self.gpu.load(ref.at[index], layout=layout, optimized=False)

    def _write(self, ref: Any, index: Any, panel: Panel, x: Value) -> None:
        x = self.gpu.layout_cast(x, self._layout_of(panel.width))
        ref = ref.at[(*index, *self._place(panel))]
        self.gpu.store(ref, x, optimized=False)

    def _place(self, panel: Panel) -> tuple[Any, ...]:
        """The rows of the block, and the columns of the group."""
        return (self._rows, self._columns(0, panel.width))[: 1 + (panel.width > 1)]

    def _shape(self, width: int) -> tuple[int, ...]:
        return (ROWS, self.of.own(width))[: 1 + (width > 1)]

    def _masked(self, panel: Panel, zero: float = 0) -> Value:
        """A panel with zeros, or other numbers, where it has no units."""
        x, width = self._value(panel), panel.width
        count = self.of.of.found.count - self._block * ROWS
        # Rows that there are not have no part in what is added up over rows.
        is_whole = not self.of.totals or self.of.rows == self.of.of.found.count
        ends = [] if is_whole else [(0, count)]
        if width != self.of.padded(width):
            ends.append((1, width - self._group * x.shape[1]))
        for axis, end in ends:
            at = self.gpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=self.layout)
            is_there = at < jnp.broadcast_to(end, x.shape)
            x = jnp.where(is_there, x, jnp.full_like(x, zero))
        return x

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
        if i in self._carry:
            return self._carry[i]
        if self.of.again and i in (stored := self.of.again.carried):
            index = self._local, *self._place(panel)
            return self._load(self._kept[stored.index(i)], index, panel)
        columns = self._columns(panel.start, panel.width)
        steps = [] if self.of.times[i] is None else [self._index]
        index = *steps, self._rows, *[columns][: panel.width > 1]
        return self._load(self._own[i], index, panel)

    def _same(self, panel: Panel) -> Value:
        if panel.of.is_number:
            return self._number(panel.of, panel.width)
        columns = self._columns(panel.start + self._zero, panel.width)
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
        return functools.reduce(_REDUCTIONS[panel.of][1], parts)

    def _product(self, panel: Panel) -> Value:
        pieces = list[tuple[Any, Factor, Any]]()
        for x, factor in zip(panel.panels, panel.factors, strict=True):
            units = self.of.padded(x.width)
            depth = units if factor.key in self._matrices else self.of.depth
            pieces += [
                (self._operands[x], factor, self.pl.ds(k, min(depth, units - k)))
                for k in range(0, units, depth)
            ]

        def run(sum_: Any) -> Value:
            rights = self._read([piece[1:] for piece in pieces], panel)
            for (left, _, units), right in zip(pieces, rights, strict=True):
                for i, j in _pairs(len(left), len(right)):
                    self.gpu.wgmma(sum_, left[i].at[self._zero, :, units], right[j])
            return sum_[...]

        shape = self._shape(panel.width)
        return self.pl.run_scoped(run, self.gpu.ACC(shape, _FLOAT))

    def _read(
        self, pieces: Sequence[tuple[Factor, Any]], panel: Panel
    ) -> Iterator[list[Any]]:
        """Parts of matrices in shared memory, while the next ones are on their way."""
        columns = self._columns(0, panel.width)
        for i, (factor, units) in enumerate(pieces):
            if i == 0:
                self._copy(*pieces[0], panel, 0)
            if i + 1 < len(pieces):
                # What is there was multiplied by.
                self.gpu.wgmma_wait(0)
                self._copy(*pieces[i + 1], panel, (i + 1) % TURNS)
            if factor.key in self._matrices:
                at = (units, columns)[:: 1 - 2 * factor.axis]
                parts = [x.at[self._zero, *at] for x in self._matrices[factor.key]]
                yield [x.transpose((1, 0)) if factor.axis else x for x in parts]
                continue
            places = self._places(factor, units, i % TURNS)
            for _, barrier in places:
                self.gpu.barrier_wait(barrier)
            yield [x.at[:, self.pl.ds(0, columns.size)] for x, _ in places]

    def _copy(self, factor: Factor, units: Any, panel: Panel, turn: int) -> None:
        """Copies some rows of a matrix that does not stay in shared memory."""
        if factor.key not in self._matrices:
            first = self._columns(0, panel.width).start
            columns = self.pl.ds(first, self.of.span)
            parts = self._streamed[factor.key, factor.axis]
            places = self._places(factor, units, turn)
            for source, place in zip(parts, places, strict=True):
                self.gpu.copy_gmem_to_smem(source.at[units, columns], *place)

    def _places(self, factor: Factor, units: Any, turn: int) -> list[tuple[Any, Any]]:
        """Where a group has them in a turn, each with what says that it is there."""
        (ref, barrier), most = self._copied, self.of.most_parts
        first = (self._group * TURNS + turn) * most
        return [
            (ref.at[first + k, self.pl.ds(0, units.size)], barrier.at[first + k])
            for k in range(self.of.parts_of(factor.matrix))
        ]


def _rows(nests: Sequence[Nest]) -> int:
    """How many carries are stored."""
    return sum(nest.levels[0] for nest in nests)


def _segment(nests: Sequence[Nest], i: Index) -> tuple[Index, Index]:
    """The first step of a segment, and how many it has."""
    first, steps, at, row = 0, 0, 0, 0
    for nest in nests:
        here = at + (i - row) * nest.stride, nest.stride
        first, steps = (
            (jnp.where(i < row, first, here[0]), jnp.where(i < row, steps, here[1]))
            if row
            else here
        )
        at, row = at + nest.length, row + nest.levels[0]
    return first, steps


def _pairs(m: int, n: int) -> list[tuple[int, int]]:
    """The parts of two sums whose products are not too small, the smallest first."""
    every = itertools.product(range(m), range(n))
    return sorted((at for at in every if sum(at) < max(m, n)), key=lambda at: -sum(at))
