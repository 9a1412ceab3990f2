"""What a slot holds: the leaves of a carry that a reverse sweep needs.

Many loops carry what their reversal never reads: sums, monitors, counters, the rows
that have been written so far. The reversal of `total + x` takes the cotangent of the
total past the step without knowing the total, and that of `rows.at[i].set(x)` knows `i`
and no rows. Such leaves are not stored, not copied, and not computed again.

Which these are follows from two programs. The reversal of a step reads some leaves. To
have them at every step, the step is run from a stored carry, which takes the leaves
that these are computed from, and so on until no leaf is added.

A buffer whose rows are written once, such as the history of an equation with delays, is
saved once, as it is at the end, and slots do not hold it. Before any step, the rows
that have been written are those of the end, and the others are those of the start
(`_rows_once.py`).
"""

import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ...._arrays import Flags, closed_under, pick, stack_type, union
from ...._programs import called, inputs_read
from .._backward_step import BackwardStep, program_of
from .._loop import Loop
from .._step import Step
from ._lean_loops import lean
from ._rows_once import rows_once
from ._saves import Needs


def leaves_read(back: BackwardStep, loop: Loop, block: int = 1) -> Flags:
    """The leaves of a carry without which a block of steps cannot be reversed.

    Args:
        back: What its reversal does.
        loop: The loop.
        block: How many steps the block has.
    """
    return _leaves_read_by(back, loop.part(block))


@functools.lru_cache(maxsize=256)
def _leaves_read_by(back: BackwardStep, loop: Loop) -> Flags:
    """The same for the loop over a block."""
    (consts, carry, x), block = back.types, loop.length
    at = slice(len(consts), len(consts) + len(carry))
    if block == 1:
        program = program_of(back)
        return tuple(_inputs_read(program, (True,) * len(program.out_avals))[at])
    # What a block reads follows from which inputs its steps read, and not from how they
    # are computed. JAX remembers the derivatives of a step that is called.
    back = back.mapped(lambda step: step.rewritten(called))
    axes = zip(x, loop.x_axes, strict=True)
    xs = [stack_type(aval, block, axis) for aval, axis in axes]
    carried, z = back.end_types
    ends = carried, [stack_type(aval, block) for aval in z]
    run = lambda *args: back(loop, args[:3], args[3])
    jaxpr = jax.make_jaxpr(run)(consts, carry, xs, ends)
    return tuple(inputs_read(jaxpr, [True] * len(jaxpr.out_avals))[at])


@functools.lru_cache(maxsize=256)
def needs_of(back: BackwardStep, step: Step, loop: Loop, block: int = 1) -> Needs:
    """The leaves of a carry that a slot must hold, and those that are saved once.

    Args:
        back: What the reversal of a step does.
        step: The step to advance by, without outputs.
        loop: The loop.
        block: How many steps are reversed at once, at most.
    """
    read = leaves_read(back, loop)
    needs = closed_needs(step, loop, read)
    # To trace a block takes a while. It cannot read more than all leaves.
    if block > 1 and back.takes_blocks and not all(needs.held):
        read = tuple(union(read, leaves_read(back, loop, 2)))
        needs = closed_needs(step, loop, read)
    return needs


def closed_needs(step: Step, loop: Loop, read: Flags) -> Needs:
    """What it takes to have some leaves at every step."""
    rows = rows_once(step, loop)

    def apart(needed: Sequence[bool]) -> Needs:
        final = [n and row is not None for n, row in zip(needed, rows, strict=True)]
        # The counter tells which rows have been written.
        counters = {row.counter for row in pick(rows, final) if row is not None}
        held = [n and not f for n, f in zip(needed, final, strict=True)]
        return Needs(
            tuple(h or i in counters for i, h in enumerate(held)), tuple(final)
        )

    def before(needed: Sequence[bool]) -> list[bool]:
        held, _ = apart(needed)
        return union(held, _leaves_before(step, held))

    return apart(closed_under(read, before))


def leaves_computed(
    step: Step, carry: Sequence[bool], ys: Sequence[bool] = ()
) -> list[bool]:
    """The leaves of a carry that it takes to compute some of them at every step.

    Args:
        step: The step.
        carry: Which leaves of the carry are needed.
        ys: Which of the outputs are.
    """
    return closed_under(carry, lambda carry: _leaves_before(step, carry, ys))


def _leaves_before(
    step: Step, carry: Sequence[bool], ys: Sequence[bool] = ()
) -> list[bool]:
    """The leaves of a carry that some of the next one are computed from."""
    found = [False] * step.num_carry
    for program in filter(None, (step.jaxpr, step.inverse)):
        outs = (*carry, *ys)[: len(program.out_avals)]
        read = _inputs_read(program, outs)[step.num_consts :]
        found = union(found, read[: step.num_carry])
    return found


def without_leaves(step: Step, held: Sequence[bool], ys: Sequence[bool] = ()) -> Step:
    """A step for some leaves of the carry, which it takes no others to compute."""
    kept = [*[True] * step.num_consts, *held, *[True] * len(step.x_types)]

    def narrow(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        outs = (*held, *ys)[: len(program.out_avals)]
        return taking(lean(program, outs), kept)

    inverse = step.inverse and narrow(step.inverse)
    return Step(narrow(step.jaxpr), step.num_consts, sum(held), inverse)


def _inputs_read(program: jex.ClosedJaxpr, used: Flags) -> list[bool]:
    program = lean(program, used)
    return inputs_read(program, [True] * len(program.out_avals))


def taking(program: jex.ClosedJaxpr, kept: Sequence[bool]) -> jex.ClosedJaxpr:
    """A program that is given those inputs alone, and reads no others."""
    jaxpr = program.jaxpr
    outs = [True] * len(jaxpr.outvars)
    jaxpr, given = partial_eval.dce_jaxpr(jaxpr, outs, instantiate=list(kept))
    assert list(given) == list(kept)
    return jex.ClosedJaxpr(jaxpr, program.consts)
