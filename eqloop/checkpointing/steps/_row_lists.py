"""Buffers of which each step writes a row, at any index: a list has all of the rows.

A delay line is a buffer of few rows in a long loop, and its rows are written again and
again. A recursion over a tree writes each row once, at indices that come with `xs`:

    line = line.at[i % 500].set(row)
    rows = rows.at[node].set(f(rows[left], rows[right]))

A slot need not hold such a buffer. The forward sweep keeps a list of the rows: first
those of the initial buffer, then what each step has written, in the order of the steps.
Nothing in it is ever written again. So it stands for the buffer before any step, whose
row `r` is the last one in the list that was written there before this step:

    step             0   1   2   3   4
    writes to row    1   0   1   2   1

    list             a b c  | d   e   f   g   h       a, b, c are the initial rows
    before step 3    e f c                            f has replaced d

Which entry of the list that is follows from the indices, and these are known before the
way back: they are computed from counters, consts and `xs` alone (`RowList.at`). If they
come round in a ring, it is a sum. If not, it is found by bisection, among the steps
that write to a row (`_tables`). This is right for any indices, for those that are
written again, that never are, and that are out of bounds.

It takes the memory of all rows that are ever written, where slots take that of the
buffer for each carry that is stored. So it depends on the layout which of the two is
smaller (`RowList.takes_less`).

It gains: without, a delay line of 500 rows in a loop of 2,000 steps takes 4 times the
memory, and 9 times as long on a CPU.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, split
from ..._calls import format_bytes
from ..._programs import run, traced
from ..._types import PyTree, Value
from ._counts import Counts
from ._loop import Loop, element, put_part, zero
from ._step import Step, make_step


@dataclasses.dataclass(frozen=True)
class RowList:
    """How the rows of a buffer are written, and the list of them.

    Attributes:
        axis: The axis of the rows.
        rows: How many rows the buffer has.
        steps: How many steps there are, at most.
        writes: How many rows each step writes, at most.
        counter: A leaf of the carry that tells which step it is.
        stride: The number that each step adds to it.
        at: A program from consts, carry and `x` to the rows that a step writes, `rows`
            for none. Of the carry, it reads only integers that `counts` knows.
        counts: The integers in the carry that are known before every step.
        ring: If a step writes a single row, the next one in a ring: the number to add
            to the counter for that row, modulo `rows`. Otherwise `None`.
        row_bytes: The bytes of a row.
    """

    axis: int
    rows: int
    steps: int
    writes: int
    counter: int
    stride: int
    at: jex.ClosedJaxpr
    counts: Counts
    ring: int | None
    row_bytes: int

    @property
    def note(self) -> str:
        """What a plan says of it."""
        return f"{{}} is a list of its rows, {format_bytes(self.nbytes)}"

    @property
    def length(self) -> int:
        """How many rows the list has."""
        return self.rows + self.steps * self.writes

    @property
    def nbytes(self) -> int:
        """The bytes of the list and, unless it is a ring, of `tables` as they are made.

        Of rows of few numbers, tables take more than the list.
        """
        entries = 2 * self.steps * self.writes + self.rows + 1
        tables = 0 if self.ring is not None else 4 * entries
        return self.length * self.row_bytes + tables

    def takes_less(self, carries: int) -> bool:
        """Whether the list takes less memory than the buffer in so many carries."""
        return self.nbytes <= carries * self.rows * self.row_bytes

    @property
    def arrays(self) -> int:
        """How many arrays the buffer is made from, besides the counter."""
        return 2 if self.ring is not None else 4

    @property
    def firsts(self) -> frozenset[int]:
        """The leaves of the initial carry that `tables` reads, and the counter."""
        if self.ring is not None:
            return frozenset([self.counter])
        return self.counts.read_by(self.at) | {self.counter}

    # The forward sweep.

    def started(self, initial: Value) -> Value:
        """The list before the first step."""
        config = [(0, 0, 0)] * initial.ndim
        config[self.axis] = (0, self.length - self.rows, 0)
        return lax.pad(initial, jnp.zeros((), initial.dtype), config)

    def written(
        self, rows: Value, after: Value, step: Value, inputs: Sequence[Value]
    ) -> Value:
        """The list after a step.

        From the list before it, the buffer after it, its number and its inputs.
        """
        (at,) = run(self.at, *inputs)
        # What is written for a row out of bounds, nobody reads.
        at = jnp.minimum(at, self.rows - 1)
        if self.writes == 1:
            new = lax.dynamic_index_in_dim(after, at[0], self.axis)
        else:
            new = jnp.take(after, at, self.axis, mode="clip")
        return put_part(rows, new, self.rows + step * self.writes, self.axis)

    # The way back.

    def tables(
        self, first: Arrays, consts: Arrays, xs: Arrays, loop: Loop
    ) -> list[Value]:
        """What `entries` reads, besides the counter: tables of all indices.

        The numbers of all writes by rows, and the place of the first one for each row.
        """
        if self.ring is not None:
            return []
        at = self.counts.at_all_steps(self.at, first, consts, xs, loop, self.steps)
        numbers = lax.iota(jnp.int32, self.steps * self.writes)
        # A stable sort: the writes to a row stay in the order of the steps. Beside the
        # numbers it gives the rows in order. A search in these takes no memory, where
        # to sort once more would take that of three tables.
        at, in_order = lax.sort((at.reshape(-1), numbers), is_stable=True, num_keys=1)
        rows = jnp.arange(self.rows + 1, dtype=jnp.int32)
        starts = jnp.searchsorted(at, rows, method="scan")
        return [in_order, starts.astype(jnp.int32)]

    def before(self, rows: Value, first: Value, *tables: Value, count: Value) -> Value:
        """The buffer before a step.

        From the last list, the first counter, the tables, and the counter by then.
        """
        places = jnp.arange(self.rows, dtype=jnp.int32)
        entries = self.entries(places, first, tables, count, for_all=True)
        return jnp.take(rows, entries, self.axis, mode="clip")

    def entries(
        self,
        row: Value,
        first: Value,
        tables: Sequence[Value],
        count: Value,
        for_all: bool = False,
    ) -> Value:
        """Where in the list rows of the buffer before a step are.

        `first` is the counter before the first step, and `count` the one before this.
        """
        step = ((_signed(count) - _signed(first)) // self.stride).astype(jnp.int32)
        if self.ring is not None:
            # Step `j` has written to `first + ring + j`, so the last one before this
            # step that has written to the row was so many steps ago, or one later.
            start = (_signed(first) + self.ring) % self.rows
            ago = (start.astype(jnp.int32) + step - 1 - row) % self.rows
            last = step - 1 - ago
            return jnp.where(last >= 0, self.rows + last, row)
        in_order, starts = tables
        # The first writes to the row come before those of this step and later ones. How
        # many they are, bit by bit.
        start, stop = _entry(starts, row), _entry(starts, row + 1)
        limit = step * self.writes

        def longer(found: Value, more: Value) -> Value:
            more = found + more
            write = _entry(in_order, jnp.minimum(more, len(in_order)) - 1)
            return jnp.where((more <= stop) & (write < limit), more, found)

        bits = (self.steps * self.writes).bit_length()
        # For all rows it is worth it to find out how many bits the numbers of writes to
        # a single row have.
        if for_all:
            bits = 32 - lax.clz(jnp.max(stop - start))
            body = lambda i, found: longer(found, 1 << (bits - 1 - i))
            found = lax.fori_loop(0, bits, body, start)
        else:
            found = start
            for bit in reversed(range(bits)):
                found = longer(found, 1 << bit)
        last = _entry(in_order, jnp.maximum(found, 1) - 1)
        return jnp.where(found > start, self.rows + last, row)


def _entry(table: Value, at: Value) -> Value:
    """Entries of a table, for places that are known to be in range."""
    return jnp.take(table, at, mode="clip") if at.ndim else element(table, at)


def _signed(counter: Value) -> Value:
    return counter.astype(jnp.dtype(f"int{8 * counter.dtype.itemsize}"))


def listing(step: Step, lists: Sequence[tuple[int, RowList]], lead: int) -> Step:
    """A step that also lists the rows that it writes.

    Its carry ends in its number and `lists`, whose leaves are counted from `lead` on.
    """

    def move(consts: list[Value], carry: list[Value], x: list[Value]) -> PyTree:
        carry, (position, *rows) = split(carry, step.num_carry)
        after, y = step(consts, carry, x)
        inputs = lax.stop_gradient([*consts, *carry[lead:], *x])
        # Nothing is differentiated by way of a list: only its values are read.
        rows = [
            own.written(row, lax.stop_gradient(after[lead + leaf]), position, inputs)
            for row, (leaf, own) in zip(rows, lists, strict=True)
        ]
        return [*after, position + 1, *rows], y

    types = step.carry_types
    of_lists = [
        traced(lambda leaf, own=own: [own.started(leaf)], [types[lead + leaf]])
        for leaf, own in lists
    ]
    carry = [
        *types,
        jax.typeof(zero()),
        *(program.out_avals[0] for program in of_lists),
    ]
    return make_step(move, step.const_types, carry, step.x_types)
