"""The kernel that runs a loop.

Each block of rows runs the whole loop by itself. What a row carries is in registers,
and the carries that the way back starts from are in memory. Of a loop that stops, a
block runs as many steps as that of its rows which goes on longest.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._arrays import Arrays, Flags, pick, split, zero_array
from ..._types import Index, Value
from ..engine.orders._levels import Nest
from ..steps._loop import Loop
from ..steps._step import Step
from ._axes import program_of_jaxpr
from ._classes import NO_ROWS, Classes
from ._pallas import when
from ._panel_loops import PanelsForward
from ._panels import NotPanelsError
from ._pending import find_rows, mark, refuse_pending
from ._pieces import Pieces, carries_of, joined_nests, repeated, steps_of
from ._row_programs import (
    RowPrograms,
    Settings,
    carried_of,
    opened,
    operations,
    read_all,
    sum_is_carried,
    zeros_of,
)
from ._scope import any_row
from ._tpu import TILE


class Forward:
    """The kernel that runs a loop, and stores carries.

    Attributes:
        step: The step.
        loop: The loop around it.
    """

    def __init__(self, step: Step, loop: Loop, settings: Settings):
        # Rows that stop by themselves have a flag each.
        classes = Classes(loop.stops and bool(step.carry_types[0].shape))
        program = program_of_jaxpr(classes, step.jaxpr)
        consts, carry, x = split(program.ins, step.num_consts, step.num_carry)
        after, y = split(program.outs, step.num_carry)
        for a, b in zip(carry, after, strict=True):
            classes.tie(a, b)

        def settle() -> None:
            outs = mark(classes, program, [NO_ROWS] * len(program.ins))
            refuse_pending(classes, NO_ROWS.union(*outs), sum_is_carried)

        found = find_rows(classes, [program], carry or [*x, *y], settle)
        self.step, self.loop = step, loop
        self.programs = RowPrograms(classes, found, settings)
        self._program = program
        self.vals = consts, carry, x, after, y

    @functools.cached_property
    def panels(self) -> PanelsForward | str:
        """The loop by panels; why it is not run so, "" if that is not there."""
        if not self.programs.settings.panels:
            return ""
        try:
            return PanelsForward(self.programs, self._program, self.vals, self.loop)
        except NotPanelsError as error:
            return str(error)

    @functools.cached_property
    def of_row(self) -> jex.ClosedJaxpr:
        """The program of a step of one row."""
        of, (c, h, x, _, y) = self.programs, self.vals
        leaves = list(map(of.leaf, (*c, *h, *y)))
        leaves += [of.leaf(v, (i, 1)) for v, i in zip(x, self.loop.x_axes, strict=True)]
        (program,) = of.for_backend([of.program(self._program)], leaves)
        return program

    def why_not_tiled(self, nests: Sequence[Nest]) -> str | None:
        """Why it is no kernel on a TPU, if it is none."""
        if self.loop.stops:
            return "rows stop at steps of their own"
        c, h, x, _, y = self.vals
        stored, (length, rows) = carries_of(nests), (self.loop.length, self.loop.rows)
        # The way back reads as much as is written here, and writes what is read.
        times = (c, 1), (h, 2 + stored), (x, 2 * length), (y, rows)
        return self.of_row and self.programs.why_not_tiled(times)

    @property
    def backend(self) -> str:
        """What a plan says of the backend of Pallas that compiles it."""
        settings = self.programs.settings
        if isinstance(self.panels, PanelsForward):
            return "; by Mosaic GPU"
        if settings.interpret or not self.of_row:
            return ""
        if self.programs.is_tiled:
            return f"; by Mosaic, in tiles of {TILE:,} rows"
        if not settings.mosaic:
            return ""
        why = self.programs.why_not_mosaic
        if why and self.panels:
            why += f"; and in several threads, {self.panels}"
        return f"; by Triton and not by Mosaic GPU: {why}" if why else "; by Mosaic GPU"

    @property
    def work(self) -> float:
        """How many operations a step has on numbers of each row."""
        return operations(self.of_row)

    def __call__(
        self,
        nests: Sequence[Nest],
        held: Flags,
        slots: int,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the loop: the final carry, `ys`, and stored carries.

        `nests` say where carries are stored, in `slots` rows; `held` says which leaves.
        """
        if isinstance(self.panels, PanelsForward):
            return self.panels(nests, held, slots, consts, init, xs)
        way = _WayForward(self, nests, held, slots, xs)
        carry, ys, stored = way.launched(consts, init, xs)
        if not self.loop.rows:
            ys = list(map(zero_array, self.loop.stacked_types(self.step.y_types)))
        return carry, ys, stored


class _WayForward:
    """A loop of some length, forwards.

    Attributes:
        forward: What is run.
        held: Which leaves of the carry are stored.
        ins: How inputs lie in memory: consts, constant arrays, the carry, and `xs`.
        outs: How outputs do: the carry, `ys`, and stored carries.
        nests: The nests with the number of their steps.
        pieces: The launches.
        is_given: Whether `ys` and stored carries are given, as zeros to write to.
    """

    def __init__(
        self,
        forward: Forward,
        nests: Sequence[Nest],
        held: Flags,
        slots: int,
        xs: Arrays,
    ):
        of, loop = forward.programs, forward.loop
        c, h, x, _, y = forward.vals
        carry = list(map(of.leaf, h))
        times = [(axis, a.shape[axis]) for axis, a in zip(loop.x_axes, xs, strict=True)]
        self.forward, self.held = forward, held or (False,) * len(h)
        self.ins = list(map(of.leaf, c)), of.lifted, carry, list(map(of.leaf, x, times))
        self.outs = (
            carry,
            [of.leaf(val, (0, loop.rows)) for val in y if loop.rows],
            [of.leaf(val, (0, slots)) for val in pick(h, self.held)],
        )
        joined, at_once = joined_nests(nests), of.steps_at_once(forward.of_row)
        if not any(self.held) and len(joined) == 1 and joined[0][1] > at_once:
            ((_, length),) = joined
            joined = [(Nest((-(-length // at_once), at_once)), length)]
        self.nests, self.pieces = joined, Pieces.of(joined, at_once)
        self.is_given = self.pieces.are_several or loop.stops

    def launched(
        self, consts: Arrays, init: Arrays, xs: Arrays
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the kernel, several times if the loop is long."""
        of, pieces, n = self.forward.programs, self.pieces, len(init)
        given = consts, of.lifted_values, init, xs
        before, lifted, carry, after = (
            [leaf.opened(a) for leaf, a in zip(leaves, arrays, strict=True)]
            for leaves, arrays in zip(self.ins, given, strict=True)
        )
        # What no step writes stays as it is given.
        kept = [*self.outs[1], *self.outs[2]] if self.is_given else []
        state = [*carry, *(zeros_of(leaf.type) for leaf in kept)]

        def launch(first: Value, state: list[Value]) -> list[Value]:
            inputs = [first, *before, *lifted, *state[:n], *after]
            at = {len(inputs) + i: n + i for i in range(len(state) - n)}
            outs = [leaf for leaves in self.outs for leaf in leaves]
            room = of.room(self.forward.of_row)
            given = [*inputs, *state[n:]]
            leaves = [None, *(x for group in self.ins for x in group), *kept]
            return of.run(self._kernel, given, [*outs, *room], at, leaves)

        if pieces.are_several:
            stops = self.forward.loop.stops
            again = (lambda state: jnp.any(state[0])) if stops else None
            piece = lambda i, state: launch(pieces.first(i), state)[: len(state)]
            made = repeated(0, pieces.count, piece, state, again)
        else:
            made = launch(pieces.first(0), state)
        made = split(made, *map(len, self.outs))[:3]
        carry, ys, stored = (
            [leaf.closed(a) for leaf, a in zip(leaves, arrays, strict=True)]
            for leaves, arrays in zip(self.outs, made, strict=True)
        )
        return carry, ys, stored

    def _kernel(self, number: Any, *refs: Any) -> None:
        given = (len(self.outs[1]) + len(self.outs[2])) * self.is_given
        counts = 1, *map(len, self.ins), given, *map(len, self.outs)
        first, c, lifted, h, x, _, out, *kept, room = split(refs, *counts)
        block = _ForwardBlock(self, number, (c, lifted, h, x), kept, room)
        carry, start, row = block.start(), 0, 0
        for nest, length in self.nests:
            segments = -(-length // nest.stride)
            bounds = self.pieces.bounds(segments, first)
            carry = block.run(nest, (start, row), length, carry, bounds)
            start, row = start + length, row + segments
        for leaf, ref, values in zip(self.outs[0], out, carry, strict=True):
            leaf.write(ref, block.rows, values)


class _ForwardBlock:
    """A block of rows, which runs the loop in the kernel."""

    def __init__(self, way: _WayForward, number: Any, ins: Any, kept: Any, room: Any):
        of = way.forward.programs
        self.of, self._way, self.rows = of, way, of.numbered(number)
        self._numbers = of.evaluating(self.rows, room)
        (c, lifted, *self._ins), (self._ys, self._stored) = ins, kept
        self._consts = self._read(0, c)
        self._more = [*of.known(self.rows), *self._read(1, lifted)]

    def _read(self, group: int, refs: Any, *time: Index) -> list[np.ndarray]:
        return read_all(self.rows, self._way.ins[group], refs, *time)

    def start(self) -> Any:
        """The initial carry."""
        vals = self._way.forward.vals[1]
        return carried_of(self.of, vals, self._read(2, self._ins[0]))

    def run(
        self,
        nest: Nest,
        start: tuple[int, int],
        end: int,
        carry: Any,
        bounds: tuple[Index, Index],
    ) -> Any:
        """Runs the segments of a nest within `bounds`; stores the carry before each.

        `start` is the first step and the row of its carry, `end` the number of steps.
        """
        stops = self._way.forward.loop.stops
        goes_on = (lambda carry: any_row(carry[0][0])) if stops else None

        def segment(i: Index, carry: Any) -> Any:
            if self._stored:
                self._store(start[1] + i, carry)
            first = i * nest.stride
            step = lambda j, carry: self._stepped(start[0] + first + j, carry)
            return repeated(0, steps_of(nest, first, end), step, carry, goes_on)

        return repeated(*bounds, segment, carry, goes_on)

    def _stepped(self, position: Index, carry: Any) -> Any:
        """The carry after a step, whose outputs are written."""
        forward = self._way.forward
        index, (_, vals, *_) = forward.loop.index(position), forward.vals
        x_now = self._read(3, self._ins[1], index)
        ins = [*self._consts, *opened(vals, self._way.ins[2], carry), *x_now]
        made = self._numbers.run(forward.of_row, [*ins, *self._more])
        made, ys = split(made, len(vals))
        if self._ys:
            self._write_kept(index, ys)
        return carried_of(self.of, vals, made)

    def _store(self, row: Index, carry: Any) -> None:
        held = pick(carry, self._way.held)
        for leaf, ref, values in zip(
            self._way.outs[2], self._stored, held, strict=True
        ):
            leaf.write(ref, self.rows, values, row)

    def _write_kept(self, index: Index, ys: Sequence[np.ndarray]) -> None:
        forward = self._way.forward
        row, is_kept = forward.loop.row(index)
        values = list(map(self.of.vectors, ys, forward.vals[4]))

        def write() -> None:
            for leaf, ref, value in zip(
                self._way.outs[1], self._ys, values, strict=True
            ):
                leaf.write(ref, self.rows, value, row)

        write() if is_kept is True else when(is_kept)(write)
