"""The kernel that goes back through a loop.

A block of rows runs the steps of a segment again, leaves their carries in a scratch,
and reverses them one by one, level by level. Of a loop that stops, a block goes back
from the last step that any of its rows has run.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._arrays import Arrays, split, sum_dtype
from ..._types import Aval, Index, Value
from ..engine.orders._levels import Nest
from ..steps._loop import Loop
from ._axes import program_of_jaxpr
from ._classes import NO_ROWS, AxisProgram, Classes, Rows, Val
from ._entries import InMemory, each_part
from ._leaves import Leaf
from ._panel_loops import PanelsBackward
from ._panels import NotPanelsError
from ._pending import find_rows, mark, refuse_pending, settled_rows
from ._pieces import Pieces, carries_of, joined_nests, steps_of
from ._row_programs import (
    RowPrograms,
    Settings,
    carried_of,
    opened,
    operations,
    read_all,
    sum_is_carried,
    type_of,
    zeros_of,
)
from ._scope import objects
from ._sums import Matrix, Summed, is_matrix
from ._tiles import NotTiledError
from ._tpu import shape_of


@dataclasses.dataclass(frozen=True)
class WayBack:
    """The programs of a way back.

    Attributes:
        again: Runs a step again, from `[*consts, *carry, *x]` to the carry after it.
        pull: Goes back past a step, from `[*consts, *carry, *x, *z, *carried]` to
            `[*sums, *carried, *xs]`.
        counts: How many consts, leaves of the carry, of `x` and of `z` there are.
        const_of: For each of the sums, the const whose type it has.
        x_of: For each of the returned `xs`, the leaf of `x` whose type it has.
        own: The type of how many steps were run; `None` if they are all.
        is_masked: Whether the last two consts are that number and the position of the
            step, which changes nothing if it was not run.
    """

    again: jex.ClosedJaxpr
    pull: jex.ClosedJaxpr
    counts: tuple[int, ...]
    const_of: tuple[int, ...]
    x_of: tuple[int, ...]
    own: Aval | None
    is_masked: bool = False


class Backward:
    """The kernel that takes cotangents back through a loop."""

    def __init__(self, way: WayBack, loop: Loop, settings: Settings):
        classes = Classes(way.own is not None and bool(way.own.shape))
        again, pull = (program_of_jaxpr(classes, p) for p in (way.again, way.pull))
        c1, h1, x1 = split(again.ins, *way.counts[:2])
        c2, h2, x2, z2, g2 = split(pull.ins, *way.counts)
        sums, before, ct_x = split(pull.outs, len(way.const_of), len(g2))
        pairs = [*zip((*c1, *h1, *x1), (*c2, *h2, *x2), strict=True)]
        pairs += [*zip(h1, again.outs, strict=True), *zip(g2, before, strict=True)]
        pairs += [(s, c2[i]) for s, i in zip(sums, way.const_of, strict=True)]
        pairs += [(s, x2[i]) for s, i in zip(ct_x, way.x_of, strict=True)]
        for a, b in pairs:
            classes.tie(a, b)

        def settle() -> None:
            outs = mark(classes, again, [NO_ROWS] * len(again.ins))
            refuse_pending(classes, NO_ROWS.union(*outs), sum_is_carried)
            none = [NO_ROWS] * (len(pull.ins) - len(g2))
            outs = lambda going: mark(classes, pull, [*none, *going])[len(sums) :]
            settled_rows([NO_ROWS] * len(g2), lambda going: outs(going)[: len(g2)])

        found = find_rows(classes, [again, pull], [*h1, *g2] or x1, settle)
        self.loop, self.way = loop, way
        self.programs = RowPrograms(classes, found, settings)
        # A scratch has a number for each row: one row must not read that of another.
        self.programs.carries = True
        self._again, self._pull = again, pull
        # Which sums are no matrices in tiles, and which was added to last.
        self._not_tiled, self.added = set[int](), 0
        self.vals = c2, h2, x2, z2, g2, sums, before, ct_x
        self.own: Leaf | None = None
        if (own := way.own) is not None:
            # Examples that stop by themselves have their axes first in all that is
            # carried.
            n, like = len(own.shape), [c2[-2]] if way.is_masked else [*g2, *h1]
            found = (val.dims[:n] for val in like if val.shape[:n] == own.shape)
            self.own = self.programs.leaf(Val(own, next(found, [])))

    @functools.cached_property
    def panels(self) -> PanelsBackward | str:
        """The way back by panels; why it is not gone so, "" if that is not there."""
        if not self.programs.settings.panels:
            return ""
        of, programs = self.programs, (self._again, self._pull)
        try:
            if self.own is not None:
                raise NotPanelsError("rows stop by themselves")
            x_of = self.way.x_of
            return PanelsBackward(of, programs, self.vals, self.loop, x_of)
        except NotPanelsError as error:
            return str(error)

    @functools.cached_property
    def of_row(self) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]:
        """The programs of one row: of a step, and of its way back."""
        c, h, x, z, going, sums, before, ct_x = self.vals
        for a, b in zip(going, before, strict=True):
            b.pending = a.pending = a.pending | b.pending
        want = list(map(self.over, (*sums, *before, *ct_x)))
        of = self.programs
        leaves = list(map(of.leaf, (*c, *h, *z, *going, *sums, *before, *ct_x)))
        leaves += [of.leaf(v, (i, 1)) for v, i in zip(x, self.loop.x_axes, strict=True)]
        programs = of.program(self._again), of.program(self._pull, want)
        again, pull = of.for_backend(programs, leaves)
        return again, pull

    @functools.cached_property
    def of_start(self) -> jex.ClosedJaxpr:
        """The program of one row that makes sums over rows of what they share."""
        given = [Val(val.aval, val.dims) for val in self.vals[4]]
        program = AxisProgram(given, given, [])
        return self.programs.program(program, list(map(self.over, self.vals[4])))

    def why_not_tiled(self, nests: Sequence[Nest]) -> str | None:
        """Why it is no kernel on a TPU, if it is none."""
        c, h, x, z, going, _, _, ct_x = self.vals
        stored, (length, rows) = carries_of(nests), (self.loop.length, self.loop.rows)
        times = (c, 1), (h, stored), (going, 2), ([*x, *ct_x], length), (z, rows)
        return self.of_row and self.programs.why_not_tiled(times)

    @property
    def work(self) -> float:
        """How many operations it takes to take a step back, on numbers of each row."""
        return operations(self.of_row[1])

    def __call__(
        self,
        nests: Sequence[Nest],
        own: Arrays,
        consts: Arrays,
        xs: Arrays,
        zs: Arrays,
        stored: Arrays,
        carried: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Goes back: the cotangents of consts, of the initial carry, and of `xs`.

        `nests` say where the carries are from; `own` is empty if rows run all steps.
        """
        if isinstance(self.panels, PanelsBackward):
            return self.panels(nests, consts, xs, zs, stored, carried)
        of, way = self.programs, _Way(self, nests, xs, zs, stored)
        # The position of a step is in the place of this number in the kernel.
        more = [*own, np.int32(0)] if self.way.is_masked else []
        arrays = [*own, *consts, *more, *of.lifted_values, *xs, *zs, *stored, *carried]
        leaves = [leaf for group in way.ins for leaf in group]
        given = [leaf.opened(a) for leaf, a in zip(leaves, arrays, strict=True)]
        before, going = split(given, len(given) - len(carried))
        try:
            return way.launched(before, going, carried, own)
        except NotTiledError:
            self._not_tiled.add(self.added)
            return self(nests, own, consts, xs, zs, stored, carried)

    def over(self, val: Val) -> Rows:
        """The rows over which a sum is yet to be added up."""
        of = self.programs
        return of.all_rows - frozenset(of.classes.of(val)) if val.pending else NO_ROWS

    def sums_of(self, vals: Sequence[Val]) -> list[Summed | Matrix]:
        """How the sums of cotangents of consts are added up."""
        of, found = self.programs, list[Summed | Matrix]()
        room = of.room(*self.of_row)
        for i, val in enumerate(vals):
            out = Summed.of(of, val, sum_dtype(val.aval.dtype, self.loop.sums))
            is_tile = is_matrix(out, room) and i not in self._not_tiled
            found.append(Matrix(val, of.blocks) if is_tile else out)
        return found


class _Way:
    """The way back through a loop of some length.

    Attributes:
        back: What goes back.
        ins: How inputs lie in memory: numbers of steps, consts, constant arrays, `xs`,
            `zs`, stored carries, and what is carried back.
        groups: The outputs: sums, what is carried back, and the cotangents of `xs`.
        nests: The nests with the number of their steps.
        first_row: How many carries are stored.
        pieces: The launches.
        is_given: Whether the cotangents of `xs` are given, as zeros to write to.
    """

    def __init__(
        self, back: Backward, nests: Sequence[Nest], xs: Arrays, zs: Arrays, stored: Any
    ):
        of, loop = back.programs, back.loop
        c, h, x, z, g, sums, before, ct_x = back.vals
        stacked = lambda vals, arrays: [
            of.leaf(v, (0, a.shape[0])) for v, a in zip(vals, arrays, strict=True)
        ]
        times = [(axis, x.shape[axis]) for x, axis in zip(xs, loop.x_axes, strict=True)]
        of_x = list(map(of.leaf, x, times))
        of_c, of_g = list(map(of.leaf, c)), list(map(of.leaf, g))
        self.back, self.carry = back, list(map(of.leaf, h))
        own = [back.own] if back.own else []
        self.ins = own, of_c, of.lifted, of_x, stacked(z, zs), stacked(h, stored), of_g
        plain = lambda val, *time: Summed.of(of, val, val.aval.dtype, *time)
        ct_times = [times[i] for i in back.way.x_of]
        self.groups = (
            back.sums_of(sums),
            list(map(plain, before)),
            list(map(plain, ct_x, ct_times)),
        )
        self.nests, self.first_row = (
            joined_nests(nests),
            sum(n.levels[0] for n in nests),
        )
        self.pieces = Pieces.of(self.nests, of.steps_at_once(*back.of_row))
        self.is_given = self.pieces.are_several or back.own is not None
        self.depth = max(len(nest.levels) for nest in nests) - 1
        # A scratch for each level, in which rows are adjacent.
        self._scratch = [
            jax.ShapeDtypeStruct(
                (size, max(leaf.count, 1), of.blocks * of.block), leaf.number
            )
            for level in range(1, self.depth + 1)
            for size in [max(n.levels[level] for n in nests if len(n.levels) > level)]
            for leaf in self.carry
        ]

    def launched(
        self, given: Arrays, going: Arrays, carried: Arrays, own: Arrays
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the kernel, several times if the loop is long."""
        groups, pieces = self.groups, self.pieces
        zeros = lambda outs: [zeros_of(type_of(out.leaf)) for out in outs]
        # What no step writes stays as it is given.
        so_far = zeros(groups[2]) if self.is_given else []
        if not pieces.are_several:
            made = self._launched(pieces.first(0), given, going, so_far)
            sums, before, ct_xs = map(_totals, groups, made)
            return sums, before, ct_xs

        def piece_before(i: Value, state: Any) -> Any:
            totals, g, so_far = state
            g = [leaf.opened(x) for leaf, x in zip(self.ins[-1], g, strict=True)]
            first = pieces.first(pieces.count - 1 - i)
            terms, g, so_far = self._launched(first, given, g, so_far)
            totals = [t + x for t, x in zip(totals, terms, strict=True)]
            return totals, _totals(groups[1], g), so_far

        steps, start = pieces.size * self.nests[0][0].stride, 0
        if own:
            start = pieces.count - (jnp.max(own[0]) + (steps - 1)) // steps
        state = zeros(groups[0]), list(carried), so_far
        made = lax.fori_loop(start, pieces.count, piece_before, state)
        return _totals(groups[0], made[0]), made[1], _totals(groups[2], made[2])

    def _launched(
        self, first: Value, given: Arrays, going: Arrays, so_far: Arrays
    ) -> list[list[Value]]:
        of, counts = self.back.programs, list(map(len, self.groups))
        inputs = [first, *given, *going]
        at = len(inputs), counts[0] + counts[1]
        aliases = {at[0] + i: at[1] + i for i in range(len(so_far))}
        outs = [out.leaf for group in self.groups for out in group]
        outs += [*self._scratch, *of.room(*self.back.of_row)]
        leaves = [None, *(leaf for group in self.ins for leaf in group)]
        leaves += [out.leaf for out in self.groups[2]][: len(so_far)]
        made = of.run(self._kernel, [*inputs, *so_far], outs, aliases, leaves)
        return split(made, *counts)[:3]

    def _kernel(self, number: Any, *refs: Any) -> None:
        counts = 1, *map(len, self.ins), len(self.groups[2]) * self.is_given
        first, *parts = split(refs, *counts, *map(len, self.groups))
        ins, (_, *outs, scratch) = parts[:7], parts[7:]
        own, room = split(scratch, self.depth * len(self.carry))
        block = _Block(self, number, ins, outs[2], own, room)
        state = block.start()
        position, row = sum(length for _, length in self.nests), self.first_row
        for nest, length in reversed(self.nests):
            segments = -(-length // nest.stride)
            position, row = position - length, row - segments
            if block.steps is not None:
                length = jnp.clip(block.steps - position, 0, length)
                segments = (length + (nest.stride - 1)) // nest.stride
            only = self.pieces.bounds(segments, first)
            state = block.reverse(-1, nest, (position, row), length, state, only)
        for group, refs, arrays in zip(self.groups[:2], outs[:2], state, strict=True):
            for out, ref, values in zip(group, refs, arrays, strict=True):
                out.write(ref, block.rows, values)


class _Block:
    """A block of rows on its way back, in the kernel.

    What is taken along are the sums so far, and what is carried back.
    """

    def __init__(
        self, way: _Way, number: Any, ins: Any, ct_xs: Any, scratch: Any, room: Any
    ):
        of = way.back.programs
        self.way, self.back, self.of = way, way.back, of
        self.rows = of.numbered(number)
        self._numbers = of.evaluating(self.rows, room)
        (own, c, lifted, *self._ins), self._ct_xs, n = ins, ct_xs, len(way.carry)
        self._levels = [scratch[d * n : (d + 1) * n] for d in range(way.depth)]
        self._consts = self._read(1, c)
        self._more = [*of.known(self.rows), *self._read(2, lifted)]
        # How many steps its rows have run at the most, if that is less than all.
        counts = [x.read(x.at) for a in self._read(0, own) for x in a.reshape(-1)]
        self.steps = jnp.max(functools.reduce(jnp.maximum, counts)) if counts else None

    def _read(self, group: int, refs: Any, *time: Index) -> list[np.ndarray]:
        return read_all(self.rows, self.way.ins[group], refs, *time)

    def start(self) -> Any:
        """What is carried back from the end."""
        of, going = self.of, self.back.vals[4]
        arrays = self._read(6, self._ins[3])
        firsts = self._numbers.run(self.back.of_start, [*arrays, *self._more])
        return [out.zeros(of) for out in self.way.groups[0]], carried_of(
            of, going, firsts
        )

    def _consts_at(self, position: Index) -> list[np.ndarray]:
        if not self.back.way.is_masked:
            return self._consts
        return [*self._consts[:-1], objects([jnp.asarray(position, jnp.int32)], ())]

    def _advanced(self, position: Index, carry: Any) -> Any:
        """The carry after a step that is run again."""
        vals, again = self.back.vals[1], self.back.of_row[0]
        x_now = self._read(3, self._ins[0], self.back.loop.index(position))
        ins = (
            *self._consts_at(position),
            *opened(vals, self.way.carry, carry),
            *x_now,
            *self._more,
        )
        return carried_of(self.of, vals, self._numbers.run(again, ins))

    def _taken(self, position: Index, carry: Any, state: Any) -> Any:
        """What is taken along after a step was taken back."""
        back, of, (x, z, _, _) = self.back, self.of, self._ins
        _, h_vals, _, _, g_vals, sums, before, _ = back.vals
        (totals, going), index = state, back.loop.index(position)
        row, is_kept = back.loop.row(index)
        zs = self._read(4, z, row)
        if is_kept is not True:
            zs = [_or_zeros(array, is_kept) for array in zs]
        ins = self._consts_at(position) + opened(h_vals, self.way.carry, carry)
        ins += [*self._read(3, x, index), *zs, *opened(g_vals, self.way.ins[6], going)]
        made = self._numbers.run(back.of_row[1], [*ins, *self._more])
        terms, going, cts = split(made, len(sums), len(g_vals))
        sum_outs, _, x_outs = self.way.groups
        added = list[Any]()
        for back.added, (out, total, term) in enumerate(
            zip(sum_outs, totals, terms, strict=True)
        ):
            added.append(out.added(of, self._numbers, total, term))
        for out, ref, a in zip(x_outs, self._ct_xs, cts, strict=True):
            out.write(ref, self.rows, of.vectors(a, out.of_step), index)
        return added, carried_of(of, before, going)

    def _stored(self, level: int, row: Index) -> Any:
        """A carry: one that the loop has stored, or one in the scratch of a level."""
        if level < 0:
            carry = self._read(5, self._ins[2], row)
            return carried_of(self.of, self.back.vals[1], carry)
        return [
            [ref[row, k, self.rows.place] for k in range(leaf.count)]
            for leaf, ref in zip(self.way.carry, self._levels[level], strict=True)
        ]

    def _store(self, level: int, row: Index, carry: Any) -> None:
        for ref, values in zip(self._levels[level], carry, strict=True):
            for k, value in enumerate(values):
                value = jnp.broadcast_to(value, shape_of(self.of.block))
                ref[row, k, self.rows.place] = value

    def reverse(
        self,
        level: int,
        nest: Nest,
        start: tuple[Index, Index],
        end: Any,
        state: Any,
        only: tuple[Index, Index] | None = None,
    ) -> Any:
        """Takes back the segments of a level (-1: the outermost), the last one first.

        `start` is the first step and the row of its carry; `only` bounds the segments.
        """
        low, count = only or (0, -(-end // nest.stride))

        def segment(i: Index, state: Any) -> Any:
            i = count - 1 - (i - low)
            position = start[0] + i * nest.stride
            carry = self._stored(level, start[1] + i)
            if len(nest.levels) == 1:
                return self._taken(position, carry, state)
            within, steps = nest.within, steps_of(nest, i * nest.stride, end)
            parts = -(-steps // within.stride)

            def fill(j: Index, carry: Any) -> Any:
                self._store(level + 1, j, carry)
                at = position + j * within.stride
                go = lambda k, carry: self._advanced(at + k, carry)
                return lax.fori_loop(0, within.stride, go, carry)

            # After its last carry, a segment does not have to be run on.
            if within.levels[0] > 1:
                carry = lax.fori_loop(0, parts - 1, fill, carry)
            self._store(level + 1, parts - 1, carry)
            return self.reverse(level + 1, within, (position, 0), steps, state)

        return lax.fori_loop(low, count, segment, state)


def _totals(outs: Sequence[Any], made: Sequence[Value]) -> list[Value]:
    return [out.total(x) for out, x in zip(outs, made, strict=True)]


def _or_zeros(array: np.ndarray, is_kept: Value) -> np.ndarray:
    """The numbers of a row of `zs`, or zeros."""

    def masked(x: Value) -> Value:
        flag = jnp.broadcast_to(is_kept, jnp.shape(x))
        return jnp.where(flag, x, jnp.zeros_like(x))

    def of(x: InMemory) -> InMemory:
        return InMemory(lambda at: each_part(masked, x.read(at)), x.at)

    return objects(list(map(of, array.reshape(-1))), array.shape)
