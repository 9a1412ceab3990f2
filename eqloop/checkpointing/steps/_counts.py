"""Integers in the carry that are known before every step, without running the steps.

Where a step writes a row of a buffer often follows from integers in the carry. These
come from others of them, from consts and from `xs`, and from nothing else:

    i = i + 1                          there is a formula, for any start
    i = (i + 1) % n                    there is one, if it is known to start in `0..n-1`
    i = where(i + 1 == n, 0, i + 1)    there is none, or none that is looked for

With a formula, all steps are computed side by side (`Count.at`). The others take a loop
over the few equations that compute them. It runs once, before the way back, and takes
no memory but for what is asked of each step (`Counts.at_all_steps`). So it does not
matter how they count, or where they start.

Only integers are computed again so: a float might be rounded in another way than in the
step itself, and then be another index.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, closed_under, is_symbolic, pick
from ..._programs import (
    aval_of,
    inputs_read,
    programs_in,
    pruned,
    run,
    without_dead_code,
)
from ..._types import Aval, Value
from ._buffers import Following
from ._known_values import RingIndex
from ._loop import Loop, element
from ._rows_once import Counter, counter_strides, followed, program_to_follow
from ._step import Step

# An integer is computed again if no array on the way to it has more entries. A key of
# random numbers has two or four.
_MOST_ENTRIES = 32
_LOOPS = frozenset({"scan", "while"})


@dataclasses.dataclass(frozen=True)
class Count:
    """How an integer in the carry counts.

    Attributes:
        stride: The number that each step adds to it.
        modulus: If it is the remainder of that, what it is divided by. Then it starts
            at zero or above, and below that number.
    """

    stride: int
    modulus: int | None = None

    def at(self, first: Value, position: Value) -> Value:
        """The integer before the step at a position."""
        count = first + (position * self.stride).astype(first.dtype)
        return count if self.modulus is None else count % self.modulus


@dataclasses.dataclass(frozen=True)
class Counts:
    """The integers in a carry that are known before every step.

    Attributes:
        formulas: For each leaf of the carry, how it counts, if there is a formula.
        walked: For each leaf, whether it is computed from step to step.
        after: A program from the inputs of a step to its carry.
        num_consts: How many consts the step has.
    """

    formulas: tuple[Count | None, ...]
    walked: tuple[bool, ...]
    after: jex.ClosedJaxpr
    num_consts: int

    def read_by(self, program: jex.ClosedJaxpr) -> frozenset[int]:
        """The leaves of the initial carry that `at_all_steps` reads for a program."""
        read = self._read(program), self._read(self.after), self.walked
        each = enumerate(zip(*read, strict=True))
        return frozenset(leaf for leaf, flags in each if any(flags))

    def unknown_to(self, program: jex.ClosedJaxpr) -> list[int]:
        """The leaves that a program of a step's inputs reads, other than these."""
        each = zip(self._read(program), self.formulas, self.walked, strict=True)
        return [
            leaf
            for leaf, (flag, formula, walked) in enumerate(each)
            if flag and formula is None and not walked
        ]

    def to_compute(self, program: jex.ClosedJaxpr) -> "Counts | None":
        """The part of these that a program needs; `None` if it needs anything else."""
        if self.unknown_to(program):
            return None
        read = self._read(program)

        def without_formula(flags: Sequence[bool]) -> list[bool]:
            pairs = zip(flags, self.formulas, strict=True)
            return [flag and formula is None for flag, formula in pairs]

        before = lambda flags: without_formula(self._read(self.after, flags))
        walked = tuple(closed_under(without_formula(read), before))
        after = pruned(self.after, walked)
        return dataclasses.replace(self, walked=walked, after=after)

    def _read(
        self, program: jex.ClosedJaxpr, used: Sequence[bool] | None = None
    ) -> list[bool]:
        """Which leaves of the carry a program of a step's inputs reads."""
        used = [True] * len(program.out_avals) if used is None else used
        return inputs_read(program, used)[self.num_consts :][: len(self.formulas)]

    def at_all_steps(
        self,
        program: jex.ClosedJaxpr,
        first: Arrays,
        consts: Arrays,
        xs: Arrays,
        loop: Loop,
        steps: int,
    ) -> Value:
        """What a program gives for the inputs of every step, stacked.

        The program returns one array, and these are what `to_compute` gave for it.
        """
        # `first` is the initial carry.
        counts, positions = len(consts), jnp.arange(steps, dtype=jnp.int32)

        def run_at(
            program: jex.ClosedJaxpr, walked: Sequence[Value], position: Value
        ) -> list[Value]:
            program, read = without_dead_code(program)
            i, carry = loop.index(position), list[Value](first)
            for leaf, formula in enumerate(self.formulas):
                if formula is not None:
                    carry[leaf] = formula.at(first[leaf], position)
            given = iter(walked)
            carry = [
                next(given) if flag else leaf
                for flag, leaf in zip(self.walked, carry, strict=True)
            ]
            # A backward step may be given more behind the `x` of the step.
            own = zip(xs, loop.x_axes, read[counts + len(first) :], strict=False)
            of_xs = [
                element(x, i, axis) if is_read else None for x, axis, is_read in own
            ]
            return run(program, *pick([*consts, *carry, *of_xs], read))

        def walk(walked: list[Value], position: Value) -> tuple[list[Value], Value]:
            (found,) = run_at(program, walked, position)
            return run_at(self.after, walked, position), found

        if any(self.walked):
            return lax.scan(walk, pick(first, self.walked), positions)[1]
        # All steps side by side.
        return jax.vmap(lambda position: run_at(program, (), position)[0])(positions)


def counts_of(step: Step, loop: Loop, counters: Mapping[int, Counter]) -> Counts:
    """The integers in the carry of a step that are known before every step.

    The step has no outputs, and the loop has the `starts` of the carry.
    """
    program = program_to_follow(step)
    formulas = _formulas(step, loop, counters)
    return Counts(formulas, tuple(_walked(program, step)), program, step.num_consts)


def _formulas(
    step: Step, loop: Loop, counters: Mapping[int, Counter]
) -> tuple[Count | None, ...]:
    """For each leaf of the carry, how it counts, if there is a formula."""
    strides = counter_strides(step)
    counts = [None if stride is None else Count(stride) for stride in strides]
    # `i = (i + 1) % n` counts in a ring, if it is never less than zero. It is not if it
    # does not start there, and the other ones of which this is assumed are not either.
    firsts = loop.padded_starts(step.num_carry)
    known = {i: c.start for i, c in counters.items() if c.start is not None}
    rings = {
        i: first
        for i, first in enumerate(firsts)
        if first is not None and first >= 0 and counts[i] is None
    }
    while rings:
        following = Following(known | dict.fromkeys(rings, 0))
        after = followed(program_to_follow(step), step, following)
        left = {
            i: Count(out.offset, out.modulus)
            for i in rings
            if isinstance(out := after[i], RingIndex)
            and out.leaf == i
            and rings[i] < out.modulus
        }
        if len(left) == len(rings):
            for i, count in left.items():
                counts[i] = count
            break
        rings = {i: rings[i] for i in left}
    return tuple(counts)


def _walked(program: jex.ClosedJaxpr, step: Step) -> list[bool]:
    """Which leaves of the carry can be computed from step to step without the rest."""
    count = step.num_carry
    found = list(map(_is_few_integers, step.carry_types))
    reads = dict[int, list[bool]]()
    for leaf in [leaf for leaf in range(count) if found[leaf]]:
        own, read = without_dead_code(program, [i == leaf for i in range(count)])
        found[leaf] = not own.effects and all(map(_is_exact, own.eqns))
        reads[leaf] = read[step.num_consts :][:count]
    # Without those that are computed from others, until none is left out.
    while True:
        left = [
            flag and not any(r and not f for r, f in zip(reads[i], found, strict=True))
            for i, flag in enumerate(found)
        ]
        if left == found:
            return left
        found = left


def _is_exact(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation, and those in it, give a few integers, and soon."""
    if eqn.primitive.name in _LOOPS:
        return False
    if not all(_is_few_integers(aval_of(out)) for out in eqn.outvars):
        return False
    return all(all(map(_is_exact, inner.eqns)) for inner in programs_in(eqn))


def _is_few_integers(aval: Aval) -> bool:
    if any(map(is_symbolic, aval.shape)) or math.prod(aval.shape) > _MOST_ENTRIES:
        return False
    kinds = jnp.integer, jnp.bool_, jax.dtypes.prng_key
    return any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)
