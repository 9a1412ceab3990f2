"""Kernels of panels, by Pallas's backend Mosaic GPU on Hopper.

A block has 64 rows and some groups of warps, each with as many units of each panel.
Matrices stay in shared memory, as arrays of bfloat16 whose sum they are. What they are
multiplied by is left there as well, and products are made by tensor cores:

    registers  --stored, waited for-->  shared memory  --product-->  registers
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import pick, split
from ..._types import Index, Value
from ..steps._loop import Loop
from ._classes import Val
from ._leaves import Axis, Leaf, RowNumbers
from ._pallas import NAME, interpreted_by_mosaic, launched
from ._panels import (
    NARROW,
    Factor,
    NotPanelsError,
    Panel,
    Panels,
    Same,
)
from ._row_programs import RowPrograms

# The rows of a product of tensor cores.
ROWS = 64
# A block of an H100 has 227 KiB, of which barriers and sums within warps take some.
_MOST_SHARED = 225 * 1024
_FLOAT = np.dtype("float32")
# So many units are those of a group, and there are no more groups.
_UNITS, _MOST_GROUPS = 32, 4


@dataclasses.dataclass(frozen=True, eq=False)
class PanelLoop:
    """A loop of steps by panels, as a kernel.

    Attributes:
        of: The programs of one row, with which rows there are.
        panels: The program of a step.
        vals: Its inputs.
        carried: Those that are carried.
        times: For each other input of rows, the axis of steps; `None` without one.
        nexts: What is carried after a step.
        outs: What is written at each step.
        loop: The loop that these steps are of.
        stored: Inputs with an entry for each step of a segment. If there are any, steps
            are taken back, from the last one to the first.
    """

    of: RowPrograms
    panels: Panels
    vals: Sequence[Val]
    carried: range
    times: dict[int, tuple[int] | None]
    nexts: Sequence[Panel]
    outs: Sequence[Panel]
    loop: Loop
    stored: frozenset[int] = frozenset()

    @functools.cached_property
    def all(self) -> list[Panel]:
        """All panels, after those that they are made of."""
        found = dict[Panel, None]()

        def visit(panel: Panel) -> None:
            if panel not in found:
                for x in panel.panels:
                    visit(x)
                found[panel] = None

        for panel in (*self.nexts, *self.outs):
            visit(panel)
        return list(found)

    def of_kind(self, kind: str, level: int | None = None) -> list[Panel]:
        return [p for p in self.all if p.kind == kind and level in (None, p.level)]

    @functools.cached_property
    def levels(self) -> int:
        return max(p.level for p in self.all)

    @functools.cached_property
    def matrices(self) -> list[tuple[Factor, int]]:
        """The parts of matrices in shared memory, each with the number of its parts."""
        found = {f.key: f for p in self.of_kind("product") for f in p.factors}
        return [(f, self._count(f.matrix.is_narrow)) for f in found.values()]

    def _count(self, is_narrow: bool) -> int:
        """How many arrays of bfloat16 add up to one."""
        is_exact = any(f.is_exact for p in self.of_kind("product") for f in p.factors)
        return 1 if is_narrow else 2 + is_exact

    def operands(self, level: int) -> list[tuple[Panel, int]]:
        """What products of a level multiply, each with the number of its parts."""
        every = (x for p in self.of_kind("product", level) for x in p.panels)
        return [(x, self._count(x.dtype == NARROW)) for x in dict.fromkeys(every)]

    @functools.cached_property
    def same(self) -> list[Any]:
        """The vectors and numbers that rows share."""
        every = [p.of for p in self.of_kind("same")]
        every += [x for p in self.all for x in p.ins if isinstance(x, Same)]
        return list(dict.fromkeys(x.var for x in every if x.value is None))

    @functools.cached_property
    def groups(self) -> int:
        """How many groups of warps a block has."""
        units = -(-self._widest // _UNITS)
        return min(1 << (units - 1).bit_length(), _MOST_GROUPS)

    @functools.cached_property
    def _widest(self) -> int:
        return max(p.width for p in self.all)

    @functools.cached_property
    def _room(self) -> tuple[bool, int]:
        """Whether levels share room, and how many columns a tile has that fits.

        If each level has room of its own, what is multiplied is left there as soon as
        it is computed, and takes no registers.
        """
        tiles = [t for t in (64, 32) if self.groups * t <= self._widest]
        every = list(itertools.product([False, True], [*tiles, 16]))
        sizes = [self._shared(*how) for how in every]
        if min(sizes) > _MOST_SHARED:
            raise NotPanelsError(f"they take {min(sizes)} B of shared memory")
        return next(
            how for how, n in zip(every, sizes, strict=True) if n <= _MOST_SHARED
        )

    @property
    def is_shared(self) -> bool:
        """Whether operands of a level are where those of the one before were."""
        return self._room[0]

    @property
    def tile(self) -> int:
        """How many columns a tile in shared memory has."""
        return self._room[1]

    def padded(self, width: int, tile: int | None = None) -> int:
        """How many columns a panel has in memory: as many for each group."""
        unit = self.groups * (tile or self.tile)
        return 1 if width == 1 else -(-width // unit) * unit

    def own(self, width: int) -> int:
        """How many of them a group has."""
        return self.padded(width) // self.groups

    def rooms(self, is_shared: bool, tile: int) -> list[int]:
        """The columns of rooms for operands, level by level, or of the widest level."""
        levels = [
            [self.padded(x.width, tile) for x, n in of_level for _ in range(n)]
            for of_level in map(self.operands, range(self.levels + 1))
        ]
        if is_shared:
            return list(map(max, itertools.zip_longest(*levels, fillvalue=0)))
        return [width for widths in levels for width in widths]

    def _shared(self, is_shared: bool, tile: int) -> int:
        size = 2 * ROWS * sum(self.rooms(is_shared, tile))
        for factor, count in self.matrices:
            a, b = (self.padded(n, tile) for n in factor.sizes)
            size += 2 * a * b * count
        return size + 4 * ROWS * self.groups * len(self.of_kind("summed"))

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
            *refs, rooms = split(refs, *counts)
            numbers = RowNumbers(found.sizes, ROWS, lax.axis_index("block"), True)
            _Block(self, numbers.first, leaves, held, refs, rooms).run(steps, stored)

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

    @functools.cached_property
    def own_inputs(self) -> list[int]:
        """The inputs of rows."""
        return sorted([*self.carried, *self.times])

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
    return axis.first is None and not axis.is_time


def joined(arrays: Sequence[Value]) -> Value:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, -1)


def _fit(x: Value, *sizes: int) -> Value:
    """An array with zeros behind, up to some sizes."""
    if x.shape == tuple(sizes):
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(sizes, x.shape, strict=True)])


def parts_of(x: Value, count: int) -> list[Value]:
    """Arrays of bfloat16 that add up to one of float32, the largest first."""
    found = [x.astype(NARROW)]
    for _ in range(count - 1):
        rest = x - found[-1].astype(_FLOAT)
        # Of an infinity, nothing is left.
        x = jnp.where(jnp.abs(rest) < jnp.inf, rest, jnp.zeros_like(rest))
        found.append(x.astype(NARROW))
    return found


class _Block:
    """A block of rows in the kernel, as one of its groups of warps sees it."""

    def __init__(
        self,
        of: PanelLoop,
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
            for ref, panel in zip(self._outs, of.outs, strict=True):
                if panel.level == level:
                    self._write(ref, (at,), panel, self._value(panel))
            new, sums = of.operands(level + 1), of.of_kind("summed", level + 1)
            if not (new or sums):
                continue
            if of.levels == 1:
                self._wait()
            later = list[tuple[Any, Value]]()
            put = later.append if of.is_shared else self._put
            for x, count in new:
                columns = self._columns(0, x.width)
                refs = self._operands[level + 1, x]
                parts = parts_of(self._masked(x), count)
                for ref, part in zip(refs, parts, strict=True):
                    put((ref.at[self._zero, :, columns], part))
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
        columns = self._columns(panel.start, panel.width) if panel.width > 1 else 0
        index = tuple(
            time if axis.is_time else columns if axis.first is None else self._rows
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
