"""What a slot holds: the leaves of a carry that reversing needs, and running on to it.

Many loops carry what their reversal never reads: sums, monitors, counters, the rows
that have been written so far. The reversal of `total + x` takes the cotangent of the
total past the step without knowing the total, and that of `rows.at[i].set(x)` knows `i`
and no rows. Such leaves are not stored, not copied, and not computed again.

Which these are follows from the two programs alone. The reversal of a step reads some
leaves; to run on to a later carry takes those of which they are computed, and so on
until no leaf is added.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.core
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ..._partition import Flags, pick, put, split, union
from ..._programs import called, inputs_read
from ._back import Around, Back, Ends, Inputs, Taken, program_of
from ._lean import lean
from ._loop import Loop, stack_type
from ._step import Step


@dataclasses.dataclass(frozen=True)
class Saves:
    """What a loop leaves for its reversal.

    Attributes:
        layout: Which carries are stored, and where.
        held: Which leaves of a carry the slots hold, of those that the way back knows.
    """

    layout: Any  # Layout | AbstractWhileOrder
    held: Flags

    @property
    def at_primal(self) -> Self | None:
        """The same, if the primal leaves it."""
        return self if self.layout.slots.outlast_primal else None

    @property
    def given(self) -> Flags | None:
        """Which leaves the slots hold that a way back is given, if it is given any."""
        return self.held if self.layout.slots.outlast_primal else None

    def of_these(self, saved: Sequence[Any], fewer: "Saves") -> list[Any]:
        """What others get of what is saved: they hold some of the same leaves."""
        if self.at_primal is None:
            return []
        numbers, slots = split(saved, len(saved) - sum(self.held))
        return [*numbers, *pick(slots, pick(fewer.held, self.held))]

    def with_tangents(self, count: int) -> "Saves":
        """The same for a carry with so many tangents behind it, which are not held."""
        return dataclasses.replace(self, held=(*self.held, *[False] * count))


@dataclasses.dataclass(frozen=True)
class Way:
    """A way back that is given no more of a carry than slots hold.

    Attributes:
        loop: The loop.
        step: The step to advance by.
        back: What is done to a step.
        layout: How the loop was stored.
    """

    loop: Loop
    step: Step
    back: Back
    layout: Any  # Layout | AbstractWhileOrder


def leaves_read(back: Back, loop: Loop, block: int = 1) -> Flags:
    """The leaves of a carry without which a block of steps cannot be reversed.

    Args:
        back: What its reversal does.
        loop: The loop.
        block: How many steps the block has.
    """
    return _leaves_read_by(back, loop.part(block))


@functools.lru_cache(maxsize=256)
def _leaves_read_by(back: Back, loop: Loop) -> Flags:
    """The same for the loop over a block."""
    (consts, carry, x), block = back.types, loop.length
    at = slice(len(consts), len(consts) + len(carry))
    if block == 1:
        program = program_of(back, loop)
        return tuple(_inputs_read(program, (True,) * len(program.out_avals))[at])
    # What a block reads follows from which inputs its steps read, and not from how they
    # are computed. JAX remembers the derivatives of a step that is called.
    back = back.mapped(lambda step: step.rewritten(called))
    axes = zip(x, loop.x_axes, strict=True)
    xs = [jex.unmapped_aval(block, axis, aval) for aval, axis in axes]
    carried, z = back.end_types
    ends = carried, [stack_type(aval, block) for aval in z]
    run = lambda *args: back(loop, args[:3], args[3])
    jaxpr = jax.make_jaxpr(run)(consts, carry, xs, ends)
    return tuple(inputs_read(jaxpr, [True] * len(jaxpr.out_avals))[at])


@functools.lru_cache(maxsize=256)
def leaves_held(back: Back, step: Step, loop: Loop, block: int = 1) -> Flags:
    """The leaves of a carry that a slot must hold.

    Args:
        back: What the reversal of a step does.
        step: The step to advance by, without outputs.
        loop: The loop.
        block: How many steps are reversed at once, at most.
    """
    held = leaves_computed(step, leaves_read(back, loop))
    # To trace a block takes a while. It cannot read more than all leaves.
    if block > 1 and back.takes_blocks and not all(held):
        held = leaves_computed(step, union(held, leaves_read(back, loop, 2)))
    return tuple(held)


def leaves_computed(
    step: Step, carry: Sequence[bool], ys: Sequence[bool] = ()
) -> list[bool]:
    """The leaves of a carry that it takes to compute some of them at every step.

    Args:
        step: The step.
        carry: Which leaves of the carry are needed.
        ys: Which of the outputs are.
    """
    while True:
        more = list(carry)
        for program in filter(None, (step.jaxpr, step.inverse)):
            outs = (*carry, *ys)[: len(program.out_avals)]
            read = _inputs_read(program, outs)[step.num_consts :]
            more = union(more, read[: step.num_carry])
        if list(more) == list(carry):
            return list(more)
        carry = more


@functools.lru_cache(maxsize=256)
def narrowed(step: Step, held: Flags) -> Step:
    """A step without outputs for the leaves that slots hold: it needs no others."""
    if all(held):
        return step
    return without_leaves(step, held)


def without_leaves(step: Step, held: Sequence[bool], ys: Sequence[bool] = ()) -> Step:
    """A step for some leaves of the carry, which it takes no others to compute."""
    kept = [*[True] * step.num_consts, *held, *[True] * len(step.x_types)]

    def narrow(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        outs = (*held, *ys)[: len(program.out_avals)]
        return _taking(lean(program, outs), kept)

    inverse = step.inverse and narrow(step.inverse)
    return Step(narrow(step.jaxpr), step.num_consts, sum(held), inverse)


def _inputs_read(program: jex.ClosedJaxpr, used: Flags) -> list[bool]:
    program = lean(program, used)
    return inputs_read(program, [True] * len(program.out_avals))


def _taking(program: jex.ClosedJaxpr, kept: Sequence[bool]) -> jex.ClosedJaxpr:
    """A program that is given those inputs alone, and reads no others."""
    jaxpr = program.jaxpr
    outs = [True] * len(jaxpr.outvars)
    jaxpr, given = partial_eval.dce_jaxpr(jaxpr, outs, instantiate=list(kept))
    assert list(given) == list(kept)
    return jex.ClosedJaxpr(jaxpr, program.consts)


@dataclasses.dataclass(frozen=True)
class Slim(Around):
    """The same reversal, given no more of a carry than slots hold.

    Attributes:
        held: Which leaves slots hold. It reads no others.
    """

    held: Flags

    @property
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        consts, carry, x = self.of.types
        return consts, pick(carry, self.held), x

    @property
    def takes_blocks(self) -> bool:
        return self.of.takes_blocks

    @property
    def joins_steps(self) -> bool:
        return self.of.joins_steps

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        return self._without_others(self.of, self.of.types[1], loop, inputs, ends)

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        carries = [stack_type(aval, loop.length) for aval in self.of.types[1]]
        return self._without_others(self.of.joined, carries, loop, inputs, ends)

    def _without_others(
        self,
        take: Callable[..., Taken],
        carry_types: list[Any],
        loop: Loop,
        inputs: Inputs,
        ends: Ends,
    ) -> Taken:
        """Runs what is left of a reversal without the leaves that it does not read."""
        consts, carry, xs = inputs
        # Of the others the type will do: it is traced, and not run.
        carry = put(carry_types, self.held, carry)
        args = ([*consts], carry, [*xs], list(map(list, ends)))
        flat, tree = jax.tree.flatten(args)
        given = [[True] * len(consts), self.held, [True] * len(xs)]
        marks = [mark for group in given for mark in group]
        marks += [True] * (len(flat) - len(marks))

        def run(*flat: Any) -> Taken:
            *inputs, ends = tree.unflatten(flat)
            return take(loop, inputs, ends)

        traced, out = jax.make_jaxpr(run, return_shape=True)(*flat)
        program = _taking(lean(traced, (True,) * len(traced.out_avals)), marks)
        outs = jax.core.eval_jaxpr(program.jaxpr, program.consts, *pick(flat, marks))
        return jax.tree.unflatten(jax.tree.structure(out), outs)


def slim(back: Back, held: Flags) -> Back:
    """A reversal that is given no more of a carry than slots hold."""
    return back if all(held) else Slim(back, held)
