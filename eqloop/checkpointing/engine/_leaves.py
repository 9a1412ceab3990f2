"""Finds out which leaves of a carry a slot has to hold.

Many loops carry leaves that their reversal never reads: sums, monitors, counters, the
rows that have been written so far. The reversal of `total + x` takes the cotangent of
the total past the step without the total itself; that of `rows.at[i].set(x)` needs `i`,
but no rows. Such leaves are not stored, not copied, and not computed again.

It follows from two programs which leaves are needed:

1. The backward step reads some leaves of the carry before a step.
2. To have these before every step, steps are run from a stored carry. Their program
   reads the leaves that the needed ones are computed from, which are then needed, too,
   and so on until no leaf is added.

A buffer whose rows are written once, such as the history of a delay equation, is needed
but not held. It is stored once, as it is at the end: before any step, a row that has
been written is as it is at the end, and any other as it was at the start
(`_rows_once.py`). Nor is one held whose rows are written again and again, such as a
delay line, if a list of all that is written takes less memory (`_row_lists.py`).

Steps and backward steps are cut down to these leaves: their programs read no others.
There is one exception: a buffer whose rows are written once may be read although slots
do not hold it. Each step makes it from the buffer at the end, the buffer at the start
and the counter at the start, which are additional consts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ..._arrays import Arrays, Flags, closed_under, pick, put, split, stack_type, union
from ..._programs import called, inputs_read, traced, without_dead_code
from ..._types import Aval, Value
from ..steps._dce import dce
from ..steps._find_lists import row_lists
from ..steps._list_reads import ListedBuffer, run_reading
from ..steps._loop import Loop
from ..steps._row_lists import RowList
from ..steps._rows_once import RowsOnce, rows_once
from ..steps._step import Step
from ._backward_step import Back, BackwardStep, past
from ._layout import Needs

# How many carries a layout stores, if it is not known yet which one it is.
USUAL_CARRIES = 32


def leaves_read(back: BackwardStep, loop: Loop, block: int = 1) -> Flags:
    """The leaves of the carry before a block that the reversal of the block reads."""
    return _leaves_read_by(back, loop.part(block))


@functools.lru_cache(maxsize=256)
def _leaves_read_by(back: BackwardStep, loop: Loop) -> Flags:
    """The leaves of the carry that the reversal of a block, this loop, reads."""
    # By `part`, loops of all lengths have the same loop over a block, and share this.
    consts, carry, *_ = back.one.counts
    if loop.length == 1:
        program = back.one.program
        read = _inputs_read(program, (True,) * len(program.out_avals))
    else:
        # A step that is one call is enough to see which inputs a block reads. JAX
        # remembers the derivatives of a function that is called, so this is faster to
        # trace.
        called_back = back.with_steps(lambda step: step.rewritten(called))
        program = past(called_back, loop, False).program
        read = inputs_read(program, [True] * len(program.out_avals))
    return tuple(read[consts : consts + carry])


def rows_written(step: Step, loop: Loop) -> list[RowsOnce | RowList | None]:
    """For each leaf of the carry, how its rows are written, if that is understood."""
    pairs = zip(rows_once(step, loop), row_lists(step, loop), strict=True)
    return [once or rows for once, rows in pairs]


@functools.lru_cache(maxsize=256)
def needs_of(
    back: BackwardStep,
    step: Step,
    loop: Loop,
    block: int = 1,
    carries: int = USUAL_CARRIES,
) -> Needs:
    """The leaves of a carry that a slot must hold, and those that are stored once.

    `step` has no outputs; at most `carries` carries are on the device at once.
    """
    # `block` is how many steps are reversed at once, at most.
    read = leaves_read(back, loop)
    needs = closed_needs(step, loop, read, carries)
    # The derivative of a block may read other leaves than that of a step, since its
    # carries come from a scan; a block of two steps stands for all longer ones. Tracing
    # it takes a while, and is of no use if slots hold all leaves already.
    if block > 1 and back.takes_blocks and not all(needs.held):
        read = tuple(union(read, leaves_read(back, loop, 2)))
        needs = closed_needs(step, loop, read, carries)
    return needs


def closed_needs(
    step: Step, loop: Loop, read: Flags, carries: int = USUAL_CARRIES
) -> Needs:
    """The leaves that have to be stored to know those of `read` before every step.

    `step` has no outputs; at most `carries` carries are on the device at once.
    """
    rows = [
        row if isinstance(row, RowsOnce) or (row and row.takes_less(carries)) else None
        for row in rows_written(step, loop)
    ]

    def apart(needed: Sequence[bool]) -> Needs:
        """Divides the needed leaves into those in slots, and those stored once."""
        final = [n and row is not None for n, row in zip(needed, rows, strict=True)]
        # The counter at a step says which rows have been written, so slots hold it.
        counters = {row.counter for row in pick(rows, final) if row is not None}
        held = [n and not f for n, f in zip(needed, final, strict=True)]
        return Needs(
            tuple(h or i in counters for i, h in enumerate(held)), tuple(final)
        )

    def before(needed: Sequence[bool]) -> list[bool]:
        # Only leaves in slots are computed from step to step.
        held, _ = apart(needed)
        return union(held, _leaves_before(step, held))

    # Leaves are only ever added. So this ends, with the fewest leaves that contain
    # `read` and can be computed from one another.
    return apart(closed_under(read, before))


def leaves_computed(
    step: Step, carry: Sequence[bool], ys: Sequence[bool] = ()
) -> list[bool]:
    """The leaves of a carry that are needed to compute some of them at every step.

    `carry` and `ys` say which leaves of the carry and of `y` are needed.
    """
    return closed_under(carry, lambda carry: _leaves_before(step, carry, ys))


def _leaves_before(
    step: Step, carry: Sequence[bool], ys: Sequence[bool] = ()
) -> list[bool]:
    """The leaves of a carry that the marked leaves of the next one are computed from.

    An inverse goes the other way, and the leaves that it reads are needed as well.
    """
    read = [False] * step.num_carry
    for program in filter(None, (step.jaxpr, step.inverse)):
        outs = (*carry, *ys)[: len(program.out_avals)]  # an inverse has no `y`
        inputs = _inputs_read(program, outs)[step.num_consts :]
        read = union(read, inputs[: step.num_carry])
    return read


def without_leaves(step: Step, held: Sequence[bool], ys: Sequence[bool] = ()) -> Step:
    """A step whose carry has only the `held` leaves, none of which needs another."""
    kept = [*[True] * step.num_consts, *held, *[True] * len(step.x_types)]

    def narrow(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        outs = (*held, *ys)[: len(program.out_avals)]
        return taking(dce(program, outs), kept)

    inverse = step.inverse and narrow(step.inverse)
    saved = step.saved and tuple(pick(step.saved, held))
    return Step(narrow(step.jaxpr), step.num_consts, sum(held), inverse, saved)


def _inputs_read(program: jex.ClosedJaxpr, used: Flags) -> list[bool]:
    program = dce(program, used)
    return inputs_read(program, [True] * len(program.out_avals))


def taking(program: jex.ClosedJaxpr, kept: Sequence[bool]) -> jex.ClosedJaxpr:
    """A program with the kept inputs alone; it must not read any other."""
    program, left = without_dead_code(program, keep=kept)
    assert left == list(kept)
    return program


@dataclasses.dataclass(frozen=True)
class StoredLeaves:
    """The leaves of a carry that are known.

    Attributes:
        held: Which leaves slots hold.
        rows: For each leaf that is made instead, how its rows are written. `None` for
            leaves in slots, and for those that are not known.
    """

    held: Flags
    rows: tuple[RowsOnce | RowList | None, ...]

    @classmethod
    def of(cls, needs: Needs, step: Step, loop: Loop) -> "StoredLeaves":
        """The leaves that are known to a sweep that is given some leaves."""
        leaves = zip(rows_written(step, loop), needs.held, needs.final, strict=True)
        rows = tuple(row if f and not h else None for row, h, f in leaves)
        return cls(needs.held, rows)

    @property
    def made(self) -> list[bool]:
        """Which leaves are made from the last and the initial carry."""
        return [row is not None for row in self.rows]

    @property
    def firsts(self) -> list[bool]:
        """The leaves of the initial carry that they are made from."""
        read = set[int]().union(*(row.firsts for row in self.rows if row is not None))
        once = [isinstance(row, RowsOnce) for row in self.rows]
        return [made or i in read for i, made in enumerate(once)]

    @property
    def lists(self) -> list[tuple[int, RowList]]:
        """The leaves that are made from a list of their rows, with these lists."""
        pairs = enumerate(self.rows)
        return [(leaf, row) for leaf, row in pairs if isinstance(row, RowList)]

    @property
    def more(self) -> int:
        """How many consts that takes, see `consts`."""
        return sum(row.arrays for row in self.rows if row is not None)

    def consts(
        self, last: Arrays, first: Arrays, consts: Arrays, xs: Arrays, loop: Loop
    ) -> list[Value]:
        """The consts that leaves are made from.

        `last` is what is stored of the last carry, `first` is the initial carry.
        """
        found = list[Value]()
        for leaf, row in enumerate(self.rows):
            if isinstance(row, RowsOnce):
                found += [last[leaf], first[leaf], first[row.counter]]
            elif row is not None:
                tables = row.tables(first, consts, xs, loop)
                found += [last[leaf], first[row.counter], *tables]
        return found

    def const_types(
        self, consts: Sequence[Aval], carry: Sequence[Aval], x: Sequence[Aval]
    ) -> list[Aval]:
        """The types of these consts, given those of the inputs of a step."""
        if not self.more:
            return []
        steps = max((row.steps for _, row in self.lists), default=1)
        loop = Loop(steps, x_axes=(0,) * len(x))
        lists = dict(self.lists)

        def of_inputs(*flat: Value) -> list[Value]:
            consts, first, xs = split(flat, *counts)
            last = [
                lists[leaf].started(value) if leaf in lists else value
                for leaf, value in enumerate(first)
            ]
            return self.consts(last, first, consts, xs, loop)

        counts = len(consts), len(carry)
        xs = [stack_type(aval, steps) for aval in x]
        return traced(of_inputs, [*consts, *carry, *xs]).out_avals

    def whole(
        self, carry: Sequence[Value], consts: Arrays, is_batch: bool = False
    ) -> list[Any]:
        """A carry with the leaves that are made, from these consts, for `run_reading`.

        `is_batch` says whether these are the stacked carries of a batch of steps.
        """
        leaves, rest = list[Any](), consts
        for row in self.rows:
            if row is None:
                continue
            own, rest = split(rest, row.arrays)
            count = carry[row.counter]
            if isinstance(row, RowList):
                leaves.append(ListedBuffer(row, own, count))
            else:
                final, initial, first = own
                before = functools.partial(row.before, final, initial, first)
                before = jax.vmap(before) if is_batch else before
                leaves.append(before(count))
        return put(carry, self.made, leaves)


@functools.lru_cache(maxsize=256)
def restricted(step: Step, leaves: StoredLeaves) -> Step:
    """A step without outputs, cut down to the leaves that slots hold."""
    if not leaves.more:
        return without_leaves(step, leaves.held)
    # An inverse is not cut down: `rows_once` recognises no buffers in a step with one.
    types = step.const_types, step.carry_types, step.x_types
    more = leaves.const_types(*types)
    narrow = _of_held(dce(step.jaxpr, leaves.held), types, more, leaves)
    return Step(narrow, step.num_consts + leaves.more, sum(leaves.held))


def restricted_back(back: BackwardStep, leaves: StoredLeaves) -> BackwardStep:
    """A backward step, cut down to these leaves. It reads no others."""
    more = tuple(leaves.const_types(*back.one.types[:3]))
    return back.changed(_restricted, leaves, more, takes_blocks=True, joins_steps=True)


def _restricted(back: Back, leaves: StoredLeaves, more: tuple[Aval, ...]) -> Back:
    consts, carry, *others = back.types
    types = consts, carry, list(itertools.chain(*others))
    program = _of_held(back.program, types, more, leaves, back.is_batch)
    counts = len(consts) + len(more), sum(leaves.held), *back.counts[2:]
    return dataclasses.replace(back, program=program, counts=counts)


def _of_held(
    program: jex.ClosedJaxpr,
    types: tuple[list[Aval], list[Aval], list[Aval]],
    more: Sequence[Aval],
    leaves: StoredLeaves,
    is_batch: bool = False,
) -> jex.ClosedJaxpr:
    """A program of a step, cut down to the leaves that slots hold.

    Its inputs are consts, those that leaves are made from, these leaves, and the rest.
    """
    # The program reads no leaf that is not known.
    consts, carry, rest = types
    counts = len(consts), len(more), len(carry)

    def of_all(*flat: Value) -> list[Value]:
        consts, more, carry, rest = split(flat, *counts)
        carry = leaves.whole(carry, more, is_batch)
        return run_reading(program, [*consts, *carry, *rest])

    program_of_all = traced(of_all, [*consts, *more, *carry, *rest])
    kept = [*[True] * (counts[0] + counts[1]), *leaves.held, *[True] * len(rest)]
    outs = (True,) * len(program_of_all.out_avals)
    return taking(dce(program_of_all, outs), kept)
