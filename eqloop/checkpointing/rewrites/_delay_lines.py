"""Rewrites delay lines that move all of their rows as rings, which write a single one.

A delay line is a buffer of the last rows. Each step puts a new row at one end of it,
and so moves all others by one:

    line = concatenate([x[None], line[:-1]])       the newest row first
    line = concatenate([line[1:], x[None]])        the newest row last

That takes time in proportion to the whole line at every step, and on the way back once
more, for its cotangents. In a ring the rows stay where they are, and the new one is
written over the oldest. For a line of three rows, `d` is written in place of `a`:

    line    a b c  ->  b c d           ring    a b c  ->  d b c
            the newest row last                the place is the number of the step

So the line becomes a ring, with the number of the step beside it in the carry. Of the
line, the step then reads rows of the ring. Where it needs all of it, it is put together
from the ring, as the step would otherwise have moved it. Before and after the loop, the
line is what it was (`Line.ring`, `Line.of_ring`).

For the way back, a ring is a buffer of which each step writes one row, and slots need
not hold that (`steps/_row_lists.py`).

It gains: without, a delay line of 500 rows takes 40 times as long on a CPU, and 4 times
the memory in a loop of 2,000 steps.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import explicit_sharding, is_symbolic, nbytes, split
from ..._programs import WRITES, aval_of, equations, row_write
from ..._types import Aval, Value
from ..steps._buffers import Following, number_of, place_of_new_rows, starts_of
from ..steps._known_values import Buffer, Moved
from ..steps._list_reads import AbstractBuffer, Found, RowSource, results, whole
from ..steps._loop import part, put_part, zero
from ..steps._rows_once import followed, program_to_follow
from ..steps._step import Step, StepResult, make_step

# What a plan says of it.
NOTE = "delay line {} becomes a ring, of which one row is written"

# A line of fewer bytes is moved as quickly as a row of a ring is found.
_LEAST_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Line:
    """A leaf of the carry that is a delay line.

    Attributes:
        axis: The axis of its rows.
        rows: How many there are.
        is_newest_first: Whether new rows are put before the others.
    """

    axis: int
    rows: int
    is_newest_first: bool

    def ring(self, line: Value) -> Value:
        """The ring before the first step."""
        return jnp.flip(line, self.axis) if self.is_newest_first else line

    def place(self, row: Value, position: Value) -> Value:
        """Where in the ring a row of the line is, before the step at a position."""
        if self.is_newest_first:
            row = self.rows - 1 - row
        return lax.rem(position + row, jnp.full_like(row, self.rows))

    def of_ring(self, ring: Value, position: Value) -> Value:
        """The line before the step at a position."""
        rows = jnp.arange(self.rows, dtype=jnp.int32)
        return jnp.take(ring, self.place(rows, position), self.axis, mode="clip")


def lines_of(step: Step) -> tuple[Line | None, ...]:
    """The leaves of the carry that are delay lines which a step moves."""
    return _followed(step)[0]


@functools.lru_cache(maxsize=128)
def _followed(step: Step) -> tuple[tuple[Line | None, ...], dict[jex.Var, Any]]:
    """The lines, and what was found of all variables of `program_to_follow`."""
    following = Following()
    names = {eqn.primitive.name for eqn in equations(step.jaxpr)}
    if names.isdisjoint({"concatenate", *WRITES}):
        return (None,) * step.num_carry, following.known
    after = followed(program_to_follow(step), step, following)
    pairs = zip(step.carry_types, after, strict=True)
    lines = tuple(_line(leaf, *pair) for leaf, pair in enumerate(pairs))
    return lines, following.known


def _line(leaf: int, aval: Aval, known: Any) -> Line | None:
    known = known.moved if isinstance(known, Buffer) else known
    if not isinstance(known, Moved) or known.leaves != {leaf}:
        return None
    rows = aval.shape[known.axis]
    is_small = any(map(is_symbolic, aval.shape)) or nbytes([aval]) < _LEAST_BYTES
    if rows < 2 or is_small or explicit_sharding(aval) is not None:
        return None
    if known.parts == (1, (0, rows - 1)):
        return Line(known.axis, rows, True)
    if known.parts == ((1, rows), 1):
        return Line(known.axis, rows, False)
    return None


def with_rings(step: Step, lines: Sequence[Line | None]) -> Step:
    """A step with rings in place of lines, and with the position behind the carry.

    `lines` has, for each leaf of the carry, the line that it is, if it is one.
    """

    def move(consts: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        *carry, position = carry
        before = [
            leaf
            if line is None
            else MovedBuffer(line, leaf, position, ((0, line.rows),), known)
            for leaf, line in zip(carry, lines, strict=True)
        ]
        after, y = split(results(program, [*consts, *before, *x]), step.num_carry)
        after = [
            whole(new) if line is None else new.next_ring
            for new, line in zip(after, lines, strict=True)
        ]
        return [*after, position + 1], list(map(whole, y))

    program, (_, known) = program_to_follow(step), _followed(step)
    carry_types = [*step.carry_types, jax.typeof(zero())]
    return make_step(move, step.const_types, carry_types, step.x_types)


@dataclasses.dataclass(frozen=True)
class MovedBuffer(AbstractBuffer):
    """Rows of a line, with new rows between them.

    Attributes:
        line: The line.
        ring: The ring before the step.
        position: The position of the step.
        parts: What lies along the axis: the rows of the line from one on to another
            one, or an array of new rows.
        known: What is known of the variables of the step.
    """

    line: Line
    ring: Value
    position: Value
    parts: tuple[Any, ...]
    known: Mapping[jex.Var, Any]

    @property
    def next_ring(self) -> Value:
        """The ring after the step, if this is the line then."""
        (new,) = [part for part in self.parts if not isinstance(part, tuple)]
        place = lax.rem(self.position, jnp.full_like(self.position, self.line.rows))
        return put_part(self.ring, new, place, self.line.axis)

    def whole(self) -> Value:
        axis = self.line.axis
        return jnp.concatenate(list(map(self._rows, self.parts)), axis)

    def _rows(self, piece: Any) -> Value:
        if not isinstance(piece, tuple):
            return piece
        line, axis = self.line, self.line.axis
        start, stop = piece
        # In the ring they lie one after the other, in two pieces: the end of one copy
        # and the start of another.
        first = stop - 1 if line.is_newest_first else start
        place = line.place(jnp.asarray(first, jnp.int32), self.position)
        twice = (
            jnp.concatenate([self.ring] * 2, axis) if stop - start > 1 else self.ring
        )
        rows = part(twice, place, stop - start, axis)
        return jnp.flip(rows, axis) if line.is_newest_first else rows

    def read(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Found | None:
        line, axis, first, found = self.line, self.line.axis, 0, None
        rows = sum(map(self._size, self.parts))
        for piece in self.parts:
            size, is_old = self._size(piece), isinstance(piece, tuple)
            shift = piece[0] - first if is_old else -first

            # Rows of other pieces are read, too, but not used.
            def at(
                row: Value, position: Value, of: Any = (first, size, shift)
            ) -> Value:
                row = jnp.clip(row, of[0], of[0] + of[1] - 1) + of[2]
                return row if position is None else line.place(row, position)

            entries = at if is_old else lambda row, _, at=at: at(row, None)
            source = RowSource(self.ring if is_old else piece, axis, rows, entries)
            own = source.read(eqn, others, self.position)
            if own is None:
                return None
            if found is not None:
                is_own = (own.rows >= first) & (own.rows < first + size)
                value = jnp.where(is_own, own.value, found.value)
                own = own._replace(value=value)
            found, first = own, first + size
        return found

    def written(self, eqn: jex.JaxprEqn, others: Sequence[Value]) -> Any:
        # The numbers of places, which are variables for some spellings.
        numbers = [
            number_of(x) if isinstance(x, jex.Literal) else self.known.get(x)
            for x in eqn.invars
        ]
        write, axis = row_write(eqn), self.line.axis
        assert write is not None
        at = place_of_new_rows(eqn, starts_of(eqn, write, numbers))
        if at is None or at[0] != axis:
            return None
        _, first, last = at
        new, rows = others[write.place - 1], aval_of(eqn.invars[0]).shape[axis]
        is_own = aval_of(eqn.invars[write.place]).shape == write.sizes
        if is_own and isinstance(new, MovedBuffer) and new.ring is self.ring:
            parts = new.parts
        else:
            parts = (lax.reshape(whole(new), write.sizes),)
        before, after = self._part(0, first), self._part(last, rows)
        return dataclasses.replace(self, parts=(*before, *parts, *after))

    def result(self, eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Any:
        axis, name = self.line.axis, eqn.primitive.name
        if name == "slice":
            return self._cut(eqn)
        if name == "concatenate" and eqn.params["dimension"] == axis:
            parts = list[Any]()
            for x in ins:
                is_same = isinstance(x, MovedBuffer) and x.ring is self.ring
                parts += x.parts if is_same else [whole(x)]
            return dataclasses.replace(self, parts=tuple(parts))
        if ins[0] is self and row_write(eqn) is not None:
            return self.written(eqn, ins[1:])  # which may be rows of the line, too
        return super().result(eqn, ins)

    def _cut(self, eqn: jex.JaxprEqn) -> Any:
        """A slice: of rows it is a smaller buffer."""
        axis, params = self.line.axis, eqn.params
        starts, stops = list(params["start_indices"]), list(params["limit_indices"])
        strides = list(params["strides"] or [1] * len(starts))
        parts = self._part(starts[axis], stops[axis])
        buffer = dataclasses.replace(self, parts=parts)
        starts[axis], stops[axis] = 0, stops[axis] - starts[axis]
        shape = list(aval_of(eqn.invars[0]).shape)
        shape[axis] = stops[axis]
        if (starts, stops, set(strides)) == ([0] * len(shape), shape, {1}):
            return buffer
        return lax.slice(buffer.whole(), starts, stops, strides)

    def _part(self, start: int, stop: int) -> tuple[Any, ...]:
        """The parts that some rows consist of."""
        found = list[Any]()
        for piece in self.parts:
            size = self._size(piece)
            low, high = max(start, 0), min(stop, size)
            if low < high and isinstance(piece, tuple):
                found.append((piece[0] + low, piece[0] + high))
            elif low < high:
                found.append(lax.slice_in_dim(piece, low, high, axis=self.line.axis))
            start, stop = start - size, stop - size
        return tuple(found)

    def _size(self, piece: Any) -> int:
        is_old = isinstance(piece, tuple)
        return piece[1] - piece[0] if is_old else piece.shape[self.line.axis]
