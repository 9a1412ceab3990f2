"""The normal form of a step: what is run in its place, and has the same meaning.

- A leaf of the carry that every step returns unchanged is a const: it is not stored in
  slots, and it comes out as the very array that went in.
- A reference that the step closes over is a leaf of the carry while the loop runs, as
  recomputation would update it again: within a step there is a reference of its own.
- No type in it is weak: derivatives lose weak types, and a primitive must keep the
  types that it has.
"""

import dataclasses
import functools

import jax
import jax.extend.core as jex

from ..._arrays import Arrays, Flags, pick, put, split, strongly_typed
from ..._programs import is_ref
from ..._types import Aval, Value
from ._loop import Loop
from ._step import Step, make_step


@dataclasses.dataclass(frozen=True)
class NormalForm:
    """A step in its normal form.

    Attributes:
        step: The step. Its consts are those of the original that are no references,
            followed by the leaves of the carry that stay; its carry are the others,
            followed by what is in the references.
        refs: Which of the original consts are references.
        stays: Which leaves of the original carry stay as they are.
    """

    step: Step
    refs: Flags
    stays: Flags

    def open(self, consts: Arrays, init: Arrays) -> tuple[list[Value], list[Value]]:
        """Consts and initial carry of the step, from those of the original."""
        refs, staying = pick(consts, self.refs), pick(init, self.stays)
        consts = [*pick(consts, _not(self.refs)), *staying]
        init = [*pick(init, _not(self.stays)), *(ref[...] for ref in refs)]
        return list(map(strongly_typed, consts)), list(map(strongly_typed, init))

    def loop(self, loop: Loop) -> Loop:
        """The loop around it, from that around the original."""
        varies, paths, starts = _not(self.stays), loop.carry_paths, loop.starts
        # The leaves by which a bar counts have no names.
        if len(paths) == len(varies):
            paths = (*pick(paths, varies), *["a reference"] * sum(self.refs))
        # What is in references, behind the other leaves, is not known.
        starts = tuple(pick(starts, varies)) if starts else ()
        return dataclasses.replace(loop, carry_paths=paths, starts=starts)

    def close(self, consts: Arrays, init: Arrays, carry: Arrays) -> list[Value]:
        """The final carry of the original, whose references are updated."""
        varying, in_refs = split(carry, sum(_not(self.stays)))
        for ref, value in zip(pick(consts, self.refs), in_refs, strict=True):
            ref[...] = value
        return put(init, _not(self.stays), varying)


@functools.lru_cache(maxsize=128)
def normal_form(step: Step, keeps_carry: bool = False) -> NormalForm:
    """The normal form of a step.

    Args:
        step: The step.
        keeps_carry: Whether all leaves of the carry are to be in that of the result,
            and in their places.
    """
    refs = tuple(map(is_ref, step.const_types))
    stays = tuple(_stays(step))
    if keeps_carry:
        stays = (False,) * len(stays)
    values = [aval.inner_aval for aval in pick(step.const_types, refs)]
    consts, staying = pick(step.const_types, _not(refs)), pick(step.carry_types, stays)

    def run(
        inputs: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        consts, staying = split(inputs, sum(_not(refs)))
        varying, in_refs = split(carry, sum(_not(stays)))
        local = list(map(jax.new_ref, in_refs))
        all_consts = put(put([None] * len(refs), refs, local), _not(refs), consts)
        all_carry = put(put([None] * len(stays), stays, staying), _not(stays), varying)
        after, y = step(all_consts, all_carry, x)
        return [*pick(after, _not(stays)), *map(jax.freeze, local)], y

    def run_back(
        inputs: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
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
    if any(refs) or any(stays) or has_weak:
        inverse = None
        if step.inverse is not None and not any(refs):
            inverse = make_step(run_back, *map(strong, types)).jaxpr
        step = make_step(run, *map(strong, types))
        step = dataclasses.replace(step, inverse=inverse)
    return NormalForm(step, refs, stays)


def _stays(step: Step) -> list[bool]:
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
