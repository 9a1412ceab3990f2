"""The normal form of a step, which the engine runs in place of the user's step.

- A leaf of the carry that every step returns unchanged becomes a const. It is not
  stored in slots, and the loop returns the very array that it was given.
- A reference (`jax.new_ref`) that the step closes over becomes a leaf of the carry.
  Each run of the step makes a reference of its own, so a step that is run again does
  not update the user's reference a second time.
- No type is weak. Derivatives lose weak types, and a primitive must return the types
  that it has declared.
- A row of a buffer that is selected by a mask is written (`_one_hot_writes.py`).
- A delay line that each step moves by one row becomes a ring (`_delay_lines.py`).
- If there is one, or if a step writes rows of a buffer and nothing in the carry counts,
  the position is the last leaf of the carry (`steps/_row_lists.py`).

For a step with consts `w` and a reference `r`, and a carry of `h` that changes and `k`
that does not:

    original       consts [w, r]   carry [h, k]
    normal form    consts [w, k]   carry [h, r[...]]
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
    SumType,
    is_narrow,
    pick,
    put,
    split,
    strongly_typed,
)
from ..._programs import is_ref
from ..._types import Aval, Value
from ..steps._find_lists import lacks_counter
from ..steps._loop import Loop, zero
from ..steps._step import Step, StepResult, make_step
from . import _delay_lines, _one_hot_writes
from ._delay_lines import Line, lines_of, with_rings
from ._one_hot_writes import with_row_writes


@dataclasses.dataclass(frozen=True)
class NormalForm:
    """A step in its normal form.

    Attributes:
        step: The step. Its consts are the consts of the original that are not
            references, followed by the leaves of the carry that never change. Its carry
            has the other leaves, followed by the contents of the references.
        refs: Which of the original consts are references.
        stays: Which leaves of the original carry never change.
        selected: For the leaves of the step's carry, whether rows that a mask selects
            are now written.
        lines: For the same leaves, the lines that they are rings of.
        counts: Whether the carry has the position behind these.
    """

    step: Step
    refs: Flags
    stays: Flags
    selected: Flags
    lines: tuple[Line | None, ...]
    counts: bool

    def open(self, consts: Arrays, init: Arrays) -> tuple[list[Value], list[Value]]:
        """The step's consts and initial carry, made from those of the original."""
        refs = pick(consts, self.refs)
        contents = [ref[...] for ref in refs]
        consts, init = self.arranged(consts, init, contents, zero())
        init = [*map(strongly_typed, init)]
        for leaf, line in enumerate(self.lines):
            if line is not None:
                init[leaf] = line.ring(init[leaf])
        return list(map(strongly_typed, consts)), init

    def arranged(
        self,
        consts: Sequence[Value],
        init: Sequence[Value],
        contents: Sequence[Value],
        position: Value = None,
    ) -> tuple[list[Value], list[Value]]:
        """What belongs to the original's consts and carry, in the order of the step's.

        References are among the consts, and `contents` belongs to what is in these.
        """
        staying, varying = pick(init, self.stays), pick(init, _not(self.stays))
        carry = [*varying, *contents, *[position] * self.counts]
        return [*pick(consts, _not(self.refs)), *staying], carry

    def loop(self, loop: Loop) -> Loop:
        """The loop around the step, made from the loop around the original."""
        varies, paths, starts = _not(self.stays), loop.carry_paths, loop.starts
        # With a bar the carry has leaves for its count, which have no paths. Then the
        # lengths differ, and the paths are left as they are: nobody can use them.
        if len(paths) == len(varies):
            paths = (*pick(paths, varies), *["a reference"] * sum(self.refs))
            paths += ("the position",) * self.counts
        # There may be fewer starts than leaves. The contents of the references come
        # after the leaves, and it is not known what they start from.
        starts = tuple(pick(starts, varies)) if starts else ()
        if self.counts:
            before = self.step.num_carry - 1
            starts = (*starts, *[None] * (before - len(starts)), 0)
        loop = loop.noting("{} never changes and becomes a const", self.stays)
        loop = dataclasses.replace(loop, carry_paths=paths, starts=starts)
        behind = [False] * self.counts
        loop = loop.noting(_one_hot_writes.NOTE, [*self.selected, *behind])
        return loop.noting(_delay_lines.NOTE, [*self.lines, *behind])

    def close(self, consts: Arrays, init: Arrays, carry: Arrays) -> list[Value]:
        """Writes to the original's references, and returns its final carry."""
        carry, position = split(carry, len(carry) - self.counts)
        carry = [
            leaf if line is None else line.of_ring(leaf, *position)
            for leaf, line in zip(carry, self.lines, strict=True)
        ]
        varying, in_refs = split(carry, sum(_not(self.stays)))
        for ref, value in zip(pick(consts, self.refs), in_refs, strict=True):
            ref[...] = value
        return put(init, _not(self.stays), varying)


@functools.lru_cache(maxsize=128)
def normal_form(step: Step, keeps_carry: bool = False) -> NormalForm:
    """The normal form of a step.

    With `keeps_carry`, every leaf of the carry stays where it is.
    """
    refs = tuple(map(is_ref, step.const_types))
    stays = tuple(_stays(step))
    # A loop with a bar needs this: the meter finds the leaves that a bar shows by their
    # place.
    if keeps_carry:
        stays = (False,) * len(stays)
    values = [aval.inner_aval for aval in pick(step.const_types, refs)]
    consts, staying = pick(step.const_types, _not(refs)), pick(step.carry_types, stays)

    def run(inputs: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        consts, staying = split(inputs, sum(_not(refs)))
        varying, in_refs = split(carry, sum(_not(stays)))
        # Made and frozen within the step: for whoever differentiates or batches it, it
        # has no reference among its inputs and outputs.
        local = list(map(jax.new_ref, in_refs))
        all_consts = put(put([None] * len(refs), refs, local), _not(refs), consts)
        all_carry = put(put([None] * len(stays), stays, staying), _not(stays), varying)
        after, y = step(all_consts, all_carry, x)
        return [*pick(after, _not(stays)), *map(jax.freeze, local)], y

    def run_back(inputs: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        consts, staying = split(inputs, step.num_consts)
        after = put(put([None] * len(stays), stays, staying), _not(stays), carry)
        return pick(step.before(consts, after, x), _not(stays)), []

    strong = lambda avals: [_strong(aval) for aval in avals]
    types = (
        [*consts, *staying],
        [*pick(step.carry_types, _not(stays)), *values],
        step.x_types,
    )
    has_weak = any(_strong(t) is not t for group in types for t in group)
    # Most steps are in their normal form already, and are not traced again.
    if any(refs) or any(stays) or has_weak:
        # An inverse cannot undo what a step has written to a reference.
        inverse, saved = None, ()
        if step.inverse is not None and not any(refs):
            inverse = make_step(run_back, *map(strong, types)).jaxpr
            saved = step.saved and tuple(pick(step.saved, _not(stays)))
        step = make_step(run, *map(strong, types))
        step = dataclasses.replace(step, inverse=inverse, saved=saved)
    step, selected = with_row_writes(step)
    lines = (None,) * step.num_carry
    if step.inverse is None and not keeps_carry:
        lines = lines_of(step)
    counts = any(lines) or lacks_counter(step)
    step = with_rings(step, lines) if counts else step
    return NormalForm(step, refs, stays, selected, lines, counts)


def reading_consts(
    step: Step, consts: Arrays, init: Arrays, sums: SumType
) -> tuple[Step, Arrays]:
    """A step that reads leaves of the carry that never change from its consts.

    It keeps them in the carry. These are the leaves whose sums are of a wider type.
    """
    moves = [s and is_narrow(x, sums) for s, x in zip(_stays(step), init, strict=True)]
    if step.inverse is not None or not any(moves):
        return step, consts
    return _reading_consts(step, tuple(moves)), [*consts, *pick(init, moves)]


@functools.lru_cache(maxsize=128)
def _reading_consts(step: Step, moves: Flags) -> Step:
    def run(inputs: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        consts, same = split(inputs, step.num_consts)
        after, y = step(consts, put(carry, moves, same), x)
        return put(after, moves, pick(carry, moves)), y

    consts = [*step.const_types, *pick(step.carry_types, moves)]
    return make_step(run, consts, step.carry_types, step.x_types)


def _stays(step: Step) -> list[bool]:
    """Which leaves of the carry a step returns as they came: as the same variable."""
    jaxpr = step.jaxpr.jaxpr
    before = jaxpr.invars[step.num_consts :][: step.num_carry]
    after = jaxpr.outvars[: step.num_carry]
    return [
        not isinstance(b, jex.Literal) and a is b
        for a, b in zip(before, after, strict=True)
    ]


def _strong(aval: Aval) -> Aval:
    return aval.strip_weak_type() if getattr(aval, "weak_type", False) else aval


def _not(flags: Flags) -> Flags:
    return tuple(not flag for flag in flags)
