"""Steps, and backward steps, that are given only the leaves of a carry in slots.

Nothing reads the other leaves (`_needed_leaves.py`), so they are left out of the
programs of the step and of the backward step. A buffer whose rows are written once
(`_rows_once.py`) is read although slots do not hold it: it is rebuilt from the last and
the initial carry, which become additional consts.
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
from .._backward_step import Around, BackwardStep, Ends, Inputs, Taken
from .._loop import Loop
from .._step import Step
from ..reversals._known_products import Products
from ._lean_loops import lean
from ._needed_leaves import taking, without_leaves
from ._rows_once import RowsOnce, rows_once
from ._saves import Needs


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a carry, and how.

    Attributes:
        held: Which leaves slots hold.
        rows: How the others are made that are known nevertheless.
    """

    held: Flags
    rows: tuple[RowsOnce | None, ...]

    @classmethod
    def of(cls, needs: Needs, step: Step, loop: Loop) -> "Known":
        """What is known by what a way back is given."""
        every = zip(rows_once(step, loop), needs.held, needs.final, strict=True)
        rows = tuple(row if f and not h else None for row, h, f in every)
        return cls(needs.held, rows)

    @property
    def made(self) -> list[bool]:
        """Which leaves are made."""
        return [row is not None for row in self.rows]

    @property
    def firsts(self) -> list[bool]:
        """Of which leaves of the initial carry they are made."""
        counters = {row.counter for row in self.rows if row is not None}
        return [made or i in counters for i, made in enumerate(self.made)]

    @property
    def more(self) -> int:
        """How many consts that takes."""
        return 3 * sum(self.made)

    def consts(self, final: Arrays, first: Arrays) -> list[Value]:
        """These consts.

        Args:
            final: The last carry.
            first: The initial one.
        """
        made = self.made
        counters = [row.counter for row in self.rows if row is not None]
        return [*pick(final, made), *pick(first, made), *(first[i] for i in counters)]

    def whole(self, carry: Sequence[Value], consts: Arrays) -> list[Value]:
        """A carry in which leaves are made.

        Args:
            carry: A carry, of which the leaves in slots are what they are.
            consts: Those that it takes.
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
def narrowed(step: Step, known: Known) -> Step:
    """A step without outputs for the leaves that slots hold: it needs no others."""
    if not known.more:
        return without_leaves(step, known.held)
    types = step.const_types, step.carry_types, step.x_types
    narrow = _of_held(lean(step.jaxpr, known.held), types, known)
    return Step(narrow, step.num_consts + known.more, sum(known.held))


def _of_held(
    program: jex.ClosedJaxpr,
    types: tuple[list[Aval], list[Aval], list[Aval]],
    known: Known,
) -> jex.ClosedJaxpr:
    """A program that is given no more of a carry than slots hold, and more consts.

    Args:
        program: From consts, carry and `x`. It needs no leaves that are not known.
        types: Their types.
        known: What is known of a carry.
    """
    consts, carry, x = types
    more = known.consts(carry, carry)

    def of_all(*flat: Value) -> list[Value]:
        consts, more, carry, x = split(flat, *counts)
        return run(program, *consts, *known.whole(carry, more), *x)

    counts = len(consts), len(more), len(carry)
    program_of_all = traced(of_all, [*consts, *more, *carry, *x])
    every = [True] * (counts[0] + counts[1]), [True] * len(x)
    outs = (True,) * len(program_of_all.out_avals)
    return taking(lean(program_of_all, outs), [*every[0], *known.held, *every[1]])


@dataclasses.dataclass(frozen=True)
class Slim(Around):
    """The same backward step, given no more of a carry than slots hold.

    Attributes:
        known: What is known of a carry. It reads no other leaves.
    """

    known: Known

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        consts, carry, x = self.inner.types
        more = self.known.consts(carry, carry)
        return [*consts, *more], pick(carry, self.known.held), x

    @property
    def takes_blocks(self) -> bool:
        return self.inner.takes_blocks

    @property
    def joins_steps(self) -> bool:
        return self.inner.joins_steps

    @property
    def products(self) -> Products | None:
        found = self.inner.products
        if found is None:
            return None
        narrow = _of_held(found.program, self.inner.types, self.known)
        return dataclasses.replace(found, program=narrow)

    def with_products(self, products: Products) -> BackwardStep | None:
        inner = self.inner.with_products(products)
        return None if inner is None else dataclasses.replace(self, inner=inner)

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        whole, types = self.known.whole, self.inner.types[1]
        return self._without_others(self.inner, whole, types, loop, inputs, ends)

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        whole = self.known.whole
        if self.known.more:
            whole = jax.vmap(whole, in_axes=(0, None))
        types = [stack_type(aval, loop.length) for aval in self.inner.types[1]]
        return self._without_others(self.inner.joined, whole, types, loop, inputs, ends)

    def _without_others(
        self,
        take: Callable[..., Taken],
        whole: Callable[..., list[Value]],
        carry_types: list[Aval],
        loop: Loop,
        inputs: Inputs,
        ends: Ends,
    ) -> Taken:
        """Runs what is left of a reversal without the leaves that it does not read."""
        held, (consts, carry, xs) = self.known.held, inputs
        # Of the others the type will do: it is traced, and not run.
        carry = put(carry_types, held, carry)
        args = ([*consts], carry, [*xs], list(map(list, ends)))
        flat, tree = jax.tree.flatten(args)
        given = [[True] * len(consts), held, [True] * len(xs)]
        marks = [mark for group in given for mark in group]
        marks += [True] * (len(flat) - len(marks))

        def run(*flat: Value) -> Taken:
            consts, carry, xs, ends = tree.unflatten(flat)
            consts, more = split(consts, len(consts) - self.known.more)
            return take(loop, (consts, whole(carry, more), xs), ends)

        traced, out = jax.make_jaxpr(run, return_shape=True)(*flat)
        program = taking(lean(traced, (True,) * len(traced.out_avals)), marks)
        outs = jax.core.eval_jaxpr(program.jaxpr, program.consts, *pick(flat, marks))
        return jax.tree.unflatten(jax.tree.structure(out), outs)
