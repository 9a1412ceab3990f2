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
"""

import functools
from collections.abc import Sequence

import jax.extend.core as jex

from ...._arrays import Flags, closed_under, pick, union
from ...._programs import called, inputs_read, without_dead_code
from ...steps._dce import dce
from ...steps._find_lists import row_lists
from ...steps._loop import Loop
from ...steps._row_lists import RowList
from ...steps._rows_once import RowsOnce, rows_once
from ...steps._step import Step
from .._backward_step import BackwardStep, past
from .._layout import Needs

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
        program = past(called_back, loop).program
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
