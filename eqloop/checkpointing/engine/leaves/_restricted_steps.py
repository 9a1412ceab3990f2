"""Cuts steps and backward steps down to the leaves of a carry that slots hold.

Other leaves are not read (`_needed_leaves.py`), so the programs can do without them.
There is one exception: a buffer whose rows are written once (`_rows_once.py`) may be
read although slots do not hold it. Each step makes it from the buffer at the end, the
buffer at the start and the counter at the start, which are additional consts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.extend.core as jex

from ...._arrays import Arrays, Flags, pick, put, split, stack_type
from ...._programs import run, traced
from ...._types import Aval, Value
from .._backward_step import (
    BackwardStep,
    BlockEnds,
    BlockResult,
    Inputs,
    NextCarry,
    WrappedStep,
)
from .._layout import Needs
from .._loop import Loop
from .._step import Step
from ..reversals._known_products import Products
from ._dce import dce
from ._needed_leaves import taking, without_leaves
from ._rows_once import RowsOnce, rows_once


@dataclasses.dataclass(frozen=True)
class StoredLeaves:
    """The leaves of a carry that are known.

    Attributes:
        held: Which leaves slots hold.
        rows: For each leaf that is made instead, how its rows are written. `None` for
            leaves in slots, and for those that are not known.
    """

    held: Flags
    rows: tuple[RowsOnce | None, ...]

    @classmethod
    def of(cls, needs: Needs, step: Step, loop: Loop) -> "StoredLeaves":
        """The leaves that are known to a sweep that is given some leaves."""
        leaves = zip(rows_once(step, loop), needs.held, needs.final, strict=True)
        rows = tuple(row if f and not h else None for row, h, f in leaves)
        return cls(needs.held, rows)

    @property
    def made(self) -> list[bool]:
        """Which leaves are made from the last and the initial carry."""
        return [row is not None for row in self.rows]

    @property
    def firsts(self) -> list[bool]:
        """The leaves of the initial carry that they are made from."""
        counters = {row.counter for row in self.rows if row is not None}
        return [made or i in counters for i, made in enumerate(self.made)]

    @property
    def more(self) -> int:
        """How many consts that takes: three for each leaf, see `consts`."""
        return 3 * sum(self.made)

    def consts(self, final: Arrays, first: Arrays) -> list[Value]:
        """The consts that leaves are made from.

        Args:
            final: The last carry.
            first: The initial carry.
        """
        made = self.made
        counters = [row.counter for row in self.rows if row is not None]
        return [*pick(final, made), *pick(first, made), *(first[i] for i in counters)]

    def whole(self, carry: Sequence[Value], consts: Arrays) -> list[Value]:
        """A carry with the leaves that are made.

        Args:
            carry: The carry, with the leaves that slots hold.
            consts: The consts that leaves are made from.
        """
        count = sum(self.made)
        final, first, counters = split(consts, count, count)
        rows = [row for row in self.rows if row is not None]
        leaves = [
            row.before(last, initial, start, carry[row.counter])
            for row, last, initial, start in zip(
                rows, final, first, counters, strict=True
            )
        ]
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

    Args:
        program: From consts, carry and `x`. It reads no leaf that is not known.
        types: The types of consts, carry and `x`.
        leaves: The leaves of a carry that are known.

    Returns:
        A program from the consts, those that leaves are made from, the leaves that
        slots hold, and `x`.
    """
    consts, carry, x = types
    more = leaves.consts(carry, carry)

    def of_all(*flat: Value) -> list[Value]:
        consts, more, carry, x = split(flat, *counts)
        return run(program, *consts, *leaves.whole(carry, more), *x)

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
        more = self.leaves.consts(carry, carry)
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

    def with_products(self, products: Products) -> BackwardStep | None:
        inner = self.inner.with_products(products)
        return None if inner is None else dataclasses.replace(self, inner=inner)

    @property
    def beside_next(self) -> NextCarry | None:
        found, held = self.inner.beside_next, self.leaves.held
        if found is None or not all(held[leaf] for leaf in found.leaves):
            return None
        # The new place of a leaf is the number of leaves in slots before it.
        leaves = tuple(sum(held[:leaf]) for leaf in found.leaves)
        return NextCarry(leaves, dataclasses.replace(self, inner=found.back))

    def __call__(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        whole, types = self.leaves.whole, self.inner.types[1]
        return self._without_others(self.inner, whole, types, loop, inputs, ends)

    def joined(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        whole = self.leaves.whole
        # The carries of the steps are stacked, the consts are shared. Without leaves to
        # make, `whole` only puts leaves in their places.
        if self.leaves.more:
            whole = jax.vmap(whole, in_axes=(0, None))
        types = [stack_type(aval, loop.length) for aval in self.inner.types[1]]
        return self._without_others(self.inner.joined, whole, types, loop, inputs, ends)

    def _without_others(
        self,
        take: Callable[..., BlockResult],
        whole: Callable[..., list[Value]],
        carry_types: list[Aval],
        loop: Loop,
        inputs: Inputs,
        ends: BlockEnds,
    ) -> BlockResult:
        """Traces a reversal for whole carries, and runs what it needs of that program.

        Args:
            take: The reversal, for whole carries.
            whole: Completes a carry, or the carries of a batch.
            carry_types: The types of these.
            loop: The loop over the block.
            inputs: The inputs of the reversal, cut down to the leaves in slots.
            ends: The other inputs of the reversal.
        """
        held, (consts, carry, xs) = self.leaves.held, inputs
        # A type is enough to trace with in place of a leaf that is not known. No
        # equation that is left reads it, or `taking` would fail.
        carry = put(carry_types, held, carry)
        args = ([*consts], carry, [*xs], list(map(list, ends)))
        flat, tree = jax.tree.flatten(args)
        given = [[True] * len(consts), held, [True] * len(xs)]
        marks = [mark for group in given for mark in group]
        marks += [True] * (len(flat) - len(marks))

        def run(*flat: Value) -> BlockResult:
            consts, carry, xs, ends = tree.unflatten(flat)
            consts, more = split(consts, len(consts) - self.leaves.more)
            return take(loop, (consts, whole(carry, more), xs), ends)

        traced, out = jax.make_jaxpr(run, return_shape=True)(*flat)
        program = taking(dce(traced, (True,) * len(traced.out_avals)), marks)
        outs = jax.core.eval_jaxpr(program.jaxpr, program.consts, *pick(flat, marks))
        return jax.tree.unflatten(jax.tree.structure(out), outs)
