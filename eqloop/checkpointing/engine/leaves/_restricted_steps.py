"""Cuts steps and backward steps down to the leaves of a carry that slots hold.

Other leaves are not read (`_needed_leaves.py`), so the programs can do without them.
There is one exception: a buffer whose rows are written once (`_rows_once.py`) may be
read although slots do not hold it. Each step makes it from the buffer at the end, the
buffer at the start and the counter at the start, which are additional consts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ...._arrays import Arrays, Flags, put, split, stack_type
from ...._programs import traced
from ...._types import Aval, Value
from ...steps._dce import dce
from ...steps._list_reads import ListedBuffer, run_reading
from ...steps._loop import Loop
from ...steps._row_lists import RowList
from ...steps._rows_once import RowsOnce
from ...steps._step import Step
from .._backward_step import Back, BackwardStep
from .._layout import Needs
from ._needed_leaves import rows_written, taking, without_leaves


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
