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
from ._classes import NO_ROWS, Classes, Val
from ._leaves import Leaf, RowNumbers
from ._pallas import when
from ._pending import find_rows, mark, refuse_pending
from ._pieces import Pieces, joined_nests, repeated, steps_of
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
        self._vals = consts, carry, x, after, y

    @functools.cached_property
    def of_row(self) -> jex.ClosedJaxpr:
        """The program of a step of one row."""
        return self.programs.program(self._program)

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

        Args:
            nests: Where segments begin, whose carries are stored.
            held: Which leaves of the carry are stored.
            slots: How many rows the arrays for these have.
            consts: The consts of the step.
            init: The initial carry.
            xs: The `xs` of the loop.
        """
        loop, of = self.loop, self.programs
        c_vals, h_vals, x_vals, after, y_vals = self._vals
        c_leaves, h_leaves = map(of.leaf, c_vals), list(map(of.leaf, h_vals))
        c_leaves = list(c_leaves)
        x_leaves = [
            of.leaf(v, (axis, x.shape[axis]))
            for v, axis, x in zip(x_vals, loop.x_axes, xs, strict=True)
        ]
        has_rows = loop.rows > 0
        y_leaves = [of.leaf(v, (0, loop.rows)) for v in y_vals if has_rows]
        held = held or (False,) * len(h_vals)
        s_leaves = [of.leaf(v, (0, slots)) for v in pick(h_vals, held)]
        program = self.of_row
        ins = [*c_leaves, *of.lifted, *h_leaves, *x_leaves]
        outs, room = [*h_leaves, *y_leaves, *s_leaves], of.room(program)
        counts = len(c_leaves), len(of.lifted), len(h_leaves), len(x_leaves)
        joined = joined_nests(nests)
        at_once = of.steps_at_once(program)
        if not any(held) and len(joined) == 1 and joined[0][1] > at_once:
            joined = [(Nest((-(-joined[0][1] // at_once), at_once)), joined[0][1])]
        pieces = Pieces.of(joined, at_once)
        kept = [*y_leaves, *s_leaves]
        # What no step writes stays as it is given: zeros.
        is_given = pieces.are_several or loop.stops
        counts = (1, *counts, len(kept) * is_given)
        counts = (*counts, len(h_leaves), len(y_leaves), len(s_leaves))

        def kernel(number: Any, *refs: Any) -> None:
            rows = of.numbered(number)
            first, c, lifted, h, x, _, out, y, stored, scratch = split(refs, *counts)
            numbers = of.evaluating(rows, scratch)
            read = functools.partial(read_all, rows)
            const = read(c_leaves, c)
            more = [*of.known(rows), *read(of.lifted, lifted)]
            carry = carried_of(of, h_vals, read(h_leaves, h))

            def store(row: Index, carry: list[list[Value]]) -> None:
                for leaf, ref, values in zip(
                    s_leaves, stored, pick(carry, held), strict=True
                ):
                    leaf.write(ref, rows, values, row)

            def move(position: Index, carry: list[list[Value]]) -> list[list[Value]]:
                index = loop.index(position)
                x_now = read(x_leaves, x, index)
                made = numbers.run(
                    program, [*const, *opened(h_vals, h_leaves, carry), *x_now, *more]
                )
                made, ys = split(made, len(h_leaves))
                if y:
                    _write_kept(of, loop, index, y_vals, y_leaves, y, rows, ys)
                return carried_of(of, h_vals, made)

            goes_on = (lambda carry: any_row(carry[0][0])) if loop.stops else None
            start = row = 0
            for nest, length in joined:

                def segment(
                    i: Index, carry: Any, nest=nest, start=start, row=row, end=length
                ) -> Any:
                    if stored:
                        store(row + i, carry)
                    first = i * nest.stride
                    go = lambda j, carry: move(start + first + j, carry)
                    return repeated(0, steps_of(nest, first, end), go, carry, goes_on)

                count = -(-length // nest.stride)
                bounds = pieces.bounds(count, first)
                carry = repeated(*bounds, segment, carry, goes_on)
                start, row = start + length, row + count
            for leaf, ref, values in zip(h_leaves, out, carry, strict=True):
                leaf.write(ref, rows, values)

        arrays = [*consts, *of.lifted_values, *init, *xs]
        given = [leaf.opened(a) for leaf, a in zip(ins, arrays, strict=True)]
        before, carry, after = split(given, len(given) - len(xs) - len(init), len(init))

        def launch(first: Value, carry: Arrays, so_far: Arrays) -> list[Value]:
            inputs = [first, *before, *carry, *after]
            at = {len(inputs) + i: len(carry) + i for i in range(len(so_far))}
            return of.run(kernel, [*inputs, *so_far], [*outs, *room], at)

        def next_piece(i: Index, state: list[Value]) -> list[Value]:
            made = launch(pieces.first(i), *split(state, len(carry)))
            return made[: len(state)]

        so_far = [zeros_of(leaf.type) for leaf in kept if is_given]
        if pieces.are_several:
            again = (lambda state: jnp.any(state[0])) if loop.stops else None
            state = [*carry, *so_far]
            made = repeated(0, pieces.count, next_piece, state, again)
        else:
            made = launch(pieces.first(0), carry, so_far)
        made = [leaf.closed(a) for leaf, a in zip(outs, made, strict=False)]
        carry, ys, stored = split(made, len(h_leaves), len(y_leaves))
        if not has_rows:
            ys = list(map(zero_array, loop.stacked_types(self.step.y_types)))
        return carry, ys, stored


def _write_kept(
    of: RowPrograms,
    loop: Loop,
    index: Index,
    vals: Sequence[Val],
    leaves: Sequence[Leaf],
    refs: Sequence[Any],
    rows: RowNumbers,
    ys: Sequence[np.ndarray],
) -> None:
    row, is_kept = loop.row(index)
    values = [of.vectors(y, val) for y, val in zip(ys, vals, strict=True)]

    def write() -> None:
        for leaf, ref, value in zip(leaves, refs, values, strict=True):
            leaf.write(ref, rows, value, row)

    write() if is_kept is True else when(is_kept)(write)
