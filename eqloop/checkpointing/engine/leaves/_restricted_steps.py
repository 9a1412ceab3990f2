"""Cuts steps and backward steps down to the leaves of a carry that slots hold.

Other leaves are not read (`_needed_leaves.py`), so the programs can do without them.
There is one exception: a buffer whose rows are written once (`_rows_once.py`) may be
read although slots do not hold it. Each step makes it from the buffer at the end, the
buffer at the start and the counter at the start, which are additional consts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from ...._arrays import Arrays, Flags, pick, put, split, stack_type, union
from ...._programs import traced
from ...._types import Aval, Value
from ...steps._dce import dce
from ...steps._list_reads import ListedBuffer, run_reading
from ...steps._loop import Loop
from ...steps._row_lists import RowList
from ...steps._rows_once import RowsOnce
from ...steps._step import Step
from .._backward_step import BackwardStep, BlockEnds, BlockResult, Inputs, WrappedStep
from .._layout import Needs
from ..reversals._known_products import Products
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
    narrow = _of_held(dce(step.jaxpr, leaves.held), types, leaves)
    return Step(narrow, step.num_consts + leaves.more, sum(leaves.held))


def _of_held(
    program: jex.ClosedJaxpr,
    types: tuple[list[Aval], list[Aval], list[Aval]],
    leaves: StoredLeaves,
) -> jex.ClosedJaxpr:
    """A program of a step, cut down to the leaves that slots hold.

    Its inputs are consts, those that leaves are made from, these leaves, and `x`.
    """
    # The program reads no leaf that is not known.
    consts, carry, x = types
    more = leaves.const_types(*types)

    def of_all(*flat: Value) -> list[Value]:
        consts, more, carry, x = split(flat, *counts)
        return run_reading(program, [*consts, *leaves.whole(carry, more), *x])

    counts = len(consts), len(more), len(carry)
    program_of_all = traced(of_all, [*consts, *more, *carry, *x])
    kept = [*[True] * (counts[0] + counts[1]), *leaves.held, *[True] * len(x)]
    outs = (True,) * len(program_of_all.out_avals)
    return taking(dce(program_of_all, outs), kept)


@dataclasses.dataclass(frozen=True)
class Restricted(WrappedStep):
    """A backward step, cut down to the leaves of a carry that slots hold.

    Attributes:
        leaves: The leaves of a carry that are known. `inner` reads no others.
    """

    leaves: StoredLeaves

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        consts, carry, x = self.inner.types
        more = self.leaves.const_types(consts, carry, x)
        return [*consts, *more], pick(carry, self.leaves.held), x

    @property
    def takes_blocks(self) -> bool:
        return self.inner.takes_blocks

    @property
    def joins_steps(self) -> bool:
        return self.inner.joins_steps

    @property
    def products(self) -> Products | None:
        products = self.inner.products
        if products is None:
            return None
        narrow = _of_held(products.program, self.inner.types, self.leaves)
        return dataclasses.replace(products, program=narrow)

    def with_products(self, products: Products) -> BackwardStep:
        return dataclasses.replace(self, inner=self.inner.with_products(products))

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        return self._without_others(self.inner, None, inputs, ends)

    def block(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        take = functools.partial(self.inner.block, loop)
        return self._without_others(take, None, inputs, ends)

    def joined(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        # The carries of the steps are stacked, the consts are shared.
        take = functools.partial(self.inner.joined, loop)
        return self._without_others(take, loop.length, inputs, ends)

    def _without_others(
        self,
        take: Callable[[Inputs, BlockEnds], BlockResult],
        batch: int | None,
        inputs: Inputs,
        ends: BlockEnds,
    ) -> BlockResult:
        """Traces a reversal for whole carries, and runs what it needs of that program.

        `batch` is the number of steps, if it is given the carries of several.
        """
        leaves, (consts, carry, xs) = self.leaves, inputs
        consts, more = split(consts, len(consts) - leaves.more)
        types = self.inner.types[1]
        if batch is not None:
            types = [stack_type(aval, batch) for aval in types]
        # A type is enough to trace with in place of a leaf that slots do not hold. No
        # equation that is left reads it if it is not known, or `taking` would fail.
        args = ([*consts], put(types, leaves.held, carry), [*xs], list(map(list, ends)))
        flat, tree = jax.tree.flatten(args)
        known = union(leaves.held, leaves.made)
        given = [[True] * len(consts), known, [True] * len(xs)]
        marks = [mark for group in given for mark in group]
        marks += [True] * (len(flat) - len(marks))

        def run(*flat: Value) -> BlockResult:
            consts, carry, xs, ends = tree.unflatten(flat)
            return take((consts, carry, xs), ends)

        traced, out = jax.make_jaxpr(run, return_shape=True)(*flat)
        program = taking(dce(traced, (True,) * len(traced.out_avals)), marks)
        carry = leaves.whole(put(types, leaves.held, carry), more, batch is not None)
        flat = [*consts, *carry, *flat[len(consts) + len(carry) :]]
        outs = run_reading(program, pick(flat, marks))
        return jax.tree.unflatten(jax.tree.structure(out), outs)
